"""Models and embedders: protocols, providers, the offline model, retries and fallbacks.

`turns`, `sessions`, `memory` and `casebank` call models and embedders through the protocols. `resolve` makes the models
that the settings name.
"""

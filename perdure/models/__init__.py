"""Models and embedders: their protocols, the providers, the offline model, and fallback and retries around a model.

`turns`, `sessions`, `memory` and `casebank` call the protocols; `resolve` makes models from settings.
"""

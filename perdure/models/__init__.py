"""Models and embedders: their protocols, the providers, the offline model, and fallback and retries around a model.

`turns`, `sessions`, `memory` and `casebank` call models and embedders through the protocols; `resolve` makes models
from settings.
"""

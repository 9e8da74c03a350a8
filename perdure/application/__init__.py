"""`perdure.send` and `perdure.result`, for applications whose own database contains perdure's tables.

Each process of the application has one `process.Parts`, created on first use from the settings (`PERDURE_*`).
"""

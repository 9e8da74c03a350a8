"""`perdure.send` and `perdure.result`, for applications that have perdure in their own database and Celery application.

Each process of the application has one `process.Parts`, made at first use from the settings (`PERDURE_*`).
"""

"""What an application calls that has perdure in its own database and its own Celery: `perdure.send`, `perdure.result`.

Each process of the application has one `process.Parts`, made at first use from the settings (`PERDURE_*`).
"""

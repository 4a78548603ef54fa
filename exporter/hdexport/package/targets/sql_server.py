"""SQL Server 2025 and Azure SQL: an external model, with `hdexport serve` as its endpoint."""

from __future__ import annotations

from hdexport.package.files import with_bundle
from hdexport.package.target import PackageTarget

_SQL = """-- hdexport serve BUNDLE behind https; its API key is the secret.
CREATE DATABASE SCOPED CREDENTIAL [https://HOST/v1/embeddings]
WITH IDENTITY = 'HTTPEndpointHeaders', SECRET = '{"Authorization": "Bearer API_KEY"}';

CREATE EXTERNAL MODEL [$name]
WITH (
    LOCATION = 'https://HOST/v1/embeddings',
    API_FORMAT = 'OpenAI',
    MODEL_TYPE = EMBEDDINGS,
    MODEL = '$name',
    CREDENTIAL = [https://HOST/v1/embeddings]
);

-- SELECT AI_GENERATE_EMBEDDINGS(text USE MODEL [$name]) FROM documents; a VECTOR($size)
"""


TARGET = PackageTarget(
    name="sql-server",
    system="SQL Server 2025",
    source="https://learn.microsoft.com/en-us/sql/t-sql/statements/create-external-model-transact-sql",
    write=with_bundle({"model.sql": _SQL}),
    next_step="hdexport serve FOLDER/bundle behind https, then run FOLDER/model.sql",
    takes=frozenset({"name"}),
)

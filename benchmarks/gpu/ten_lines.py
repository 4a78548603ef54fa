import sys

import pyarrow as pa
import pyarrow.parquet as pq
from sentence_transformers import SentenceTransformer

checkpoint, source, output = sys.argv[1:]
table = pq.read_table(source)
model = SentenceTransformer(checkpoint, model_kwargs={"dtype": "float16"})
vectors = model.encode(table["text"].to_pylist())
embedded = table.select(["id"]).append_column("embedding", pa.array(list(vectors)))
pq.write_table(embedded, output)

"""A bundle in ``ray.data.Dataset.map_batches``."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa

from hdruntime.backends.precision import Precision
from hdruntime.errors import InputError
from hdruntime.jobs.arrow_columns import array_of_cells, parquet_field
from hdruntime.jobs.options import RowOptions
from hdruntime.jobs.row_inference import LocalPool, fields_of_rows
from hdruntime.jobs.row_reader import row_maker
from hdruntime.jobs.rows import Columns, Position, Row
from hdruntime.jobs.shards import split_into_shards
from hdruntime.ray.worker import session_in_worker
from hdruntime.tasks.of_bundle import check_pairs, task_of_bundle
from hdruntime.text.encoding import Overflow

logger = logging.getLogger(__name__)


class BundleMapper:
    """Adds a bundle's results to the rows of a ``ray.data.Dataset``: one session per actor.

    ::

        import ray
        import hdruntime.ray

        texts = ray.data.read_parquet("texts/")  # a column "text"
        results = texts.map_batches(
            hdruntime.ray.BundleMapper,
            fn_constructor_kwargs={"bundle": "/shared/bundle"},
            batch_format="pyarrow",
            batch_size=1024,
            compute=ray.data.ActorPoolStrategy(size=2),
            num_gpus=1,  # of each actor; leave it out for CPUs, and give num_cpus
        )
        results.write_parquet("results/")

    The columns of the task (an embedding, a label, ...), ``tokens`` and ``error`` are added, of the types that
    ``hdexport run`` writes to Parquet. A row that fails has its error there, and the others continue.

    Rows of a batch are sorted by length among themselves, so large batches waste less; ``batch_size=1024`` is a good
    start. Beside a GPU, a large batch is tokenized in shards, each while the one before it runs. An actor uses the
    GPU of ``num_gpus``, else the whole cores of ``num_cpus``, at least one.

    Args:
        bundle: path of the bundle on every node, on a shared file system or a copy.
        text_column: column of the text.
        text_pair_column: column of the second text, for tasks on pairs; for question answering, the context.
        input_ids_column: column of lists of token ids, instead of a text.
        backend: see :func:`hdruntime.load`; ``auto`` uses a GPU only with ``num_gpus``.
        threads: CPU threads of an actor; None for the cores that Ray assigned.
        precision: see :func:`hdruntime.load`.
        options: options of the rows, for example ``RowOptions(overflow=Overflow.TRUNCATE)``.

    Raises:
        BundleError: a node has no bundle at the path, or a damaged one.
        BackendError: the backend cannot run on a node, or needs a GPU that Ray did not assign.
        InputError: an option does not fit the bundle's task.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        text_column: str = "text",
        text_pair_column: str | None = None,
        input_ids_column: str | None = None,
        backend: str = "auto",
        threads: int | None = None,
        precision: Precision | str = Precision.AUTO,
        options: RowOptions | None = None,
    ) -> None:
        self._columns = Columns(id="", text=text_column, text_pair=text_pair_column, input_ids=input_ids_column)
        options = options or RowOptions()
        options.check()
        if options.late_chunking is not None:
            raise InputError(
                "BundleMapper adds columns to rows, and late chunking makes several rows of one.",
                hint="Run a job with hdexport run, or call session.embed_chunks in flat_map.",
            )
        session, opened, _ = session_in_worker(Path(bundle), backend=backend, threads=threads, precision=precision)
        task = task_of_bundle(opened, options, tokenized=input_ids_column is not None)
        has_pair, has_ids = text_pair_column is not None, input_ids_column is not None
        check_pairs(task, has_pair=has_pair, has_ids=has_ids)
        if options.overflow is Overflow.SPLIT and not (task.splits and input_ids_column is None):
            raise InputError(
                "Rows of ids, or of this task, are not split.", hint="Cut them: RowOptions(overflow=Overflow.TRUNCATE)"
            )
        self._fields = [parquet_field(field) for field in fields_of_rows(task, options.overflow)]
        self._pool = LocalPool(session, task, options=options)
        self._says_truncation = True

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The rows with their results.

        Args:
            batch: a batch with ``batch_format="pyarrow"``.

        Raises:
            InputError: the batch is not an Arrow table, lacks a column of texts, or has one with the name of a result.
            BackendError: the backend failed, and not because of a row.
        """
        if not isinstance(batch, pa.Table):
            raise InputError(
                f"BundleMapper was given a {type(batch).__name__}; it needs Arrow tables.",
                hint='Call map_batches(..., batch_format="pyarrow").',
            )
        self._check_names(batch)
        shards = split_into_shards(self._rows(batch), characters=self._pool.shard_characters)
        done = [of_shard.written(str) for _, of_shard in self._pool.map(shards)]
        results = [result for of_shard in done for result in of_shard.results]
        truncated = sum(of_shard.counts.truncated_rows for of_shard in done)
        if truncated and self._says_truncation:
            self._says_truncation = False
            logger.warning("%d of %d rows are truncated, and perhaps rows of later batches.", truncated, len(results))
        for field in self._fields:
            batch = batch.append_column(field, array_of_cells([result[field.name] for result in results], field))
        return batch

    def _check_names(self, batch: pa.Table) -> None:
        names = ", ".join(batch.column_names)
        for name in self._columns.content:
            if name not in batch.column_names:
                raise InputError(
                    f"The dataset has no column {name!r}; its columns are {names}.",
                    hint='Name the texts\' column: fn_constructor_kwargs={"text_column": ...}',
                )
        taken = [field.name for field in self._fields if field.name in batch.column_names]
        if taken:
            raise InputError(
                f"The dataset already has columns {', '.join(map(repr, taken))}, which are names of results.",
                hint="Rename them: dataset.rename_columns({...})",
            )

    def _rows(self, batch: pa.Table) -> list[Row]:
        row_of = row_maker(self._columns)
        values = batch.select(list(self._columns.content)).to_pylist()
        return [row_of(row, Position(row=number)) for number, row in enumerate(values, start=1)]

"""Compiling pieces into packages on disk, several at a time."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from compiled_engine.compile.ledger import Ledger
from compiled_engine.compile.pieces import package_piece
from compiled_engine.compile.pipeline import Progress
from compiled_engine.compile.split import Piece
from compiled_engine.errors import CaptureError


@dataclass(frozen=True)
class _Job:
    key: str
    process: BaseProcess
    answer: Connection
    started: float


def compile_packages(
    pieces: Mapping[str, Piece], folder: Path, progress: Progress, ledger: Ledger, workers: int | None = None
) -> dict[str, Path]:
    """A package in ``folder`` for each of ``pieces``, by key, compiled by ``workers`` processes (None: one per core).

    Once a process has used a GPU, processes forked from it cannot; 0 ``workers`` compile in this one.

    Raises ``CaptureError`` with the compiler's own message for the first piece that fails; the others are given up.
    """
    if not pieces:
        return {}
    # Imported before the processes are forked, which then share it. What the parent does with threads until then is
    # tracing alone: no thread pool is alive that a forked process would wait for.

    if workers == 0:
        return _compile_here(pieces, folder, progress, ledger)
    workers = workers or len(os.sched_getaffinity(0))
    waiting, running = list(pieces), dict[str, _Job]()
    done: dict[str, Path] = {}
    progress("compiling pieces", 0, len(pieces))
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = _start(waiting.pop(0), pieces, folder)
                running[job.key] = job
            wait([job.answer for job in running.values()])
            for job in [job for job in running.values() if job.answer.poll()]:
                _finish(job)
                del running[job.key]
                done[job.key] = folder / f"{job.key}.pt2"
                ledger.add(f"compile piece {job.key[:8]}", time.monotonic() - job.started)
                progress("compiling pieces", len(done), len(pieces))
    finally:
        for job in running.values():
            job.process.kill()
            job.process.join()
    return done


def _compile_here(pieces: Mapping[str, Piece], folder: Path, progress: Progress, ledger: Ledger) -> dict[str, Path]:
    done: dict[str, Path] = {}
    for key, piece in pieces.items():
        progress("compiling pieces", len(done), len(pieces))
        started = time.monotonic()
        done[key] = folder / f"{key}.pt2"
        package_piece(piece, done[key])
        ledger.add(f"compile piece {key[:8]}", time.monotonic() - started)
    progress("compiling pieces", len(done), len(pieces))
    return done


def _start(key: str, pieces: Mapping[str, Piece], folder: Path) -> _Job:
    context = multiprocessing.get_context("fork")
    answer, question = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(pieces[key], folder / f"{key}.pt2", question), daemon=False)
    process.start()
    question.close()
    return _Job(key, process, answer, time.monotonic())


def _work(piece: Piece, path: Path, answer: Connection) -> None:
    torch.set_num_threads(1)
    try:
        package_piece(piece, path)
    except CaptureError as error:
        answer.send(str(error))
    else:
        answer.send(None)


def _finish(job: _Job) -> None:
    try:
        message = job.answer.recv()
    except EOFError:
        job.process.join()
        raise CaptureError(
            f"the process that compiled piece {job.key[:12]} died (exit code {job.process.exitcode}); was memory short?"
        ) from None
    job.process.join()
    if message is not None:
        raise CaptureError(message)

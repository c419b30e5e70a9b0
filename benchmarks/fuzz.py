"""The long run of the fuzzing in ``tests/fuzz``: many cases a surface, each surface in a process with little memory.

    python benchmarks/fuzz.py --cases 100000 --seed 1
    python benchmarks/fuzz.py --surface gguf --cases 5000
    python benchmarks/fuzz.py --replay fuzz-findings/gguf-1.txt

Prints cases, refusals, the slowest case and the peak memory of each surface. Ends with 1 when any case broke the promise
(see ``tests/fuzz/fuzz_harness.py``); its input is then in the folder of ``--findings``, once for each place in the code.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing as mp
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "fuzz"), str(ROOT / "tests"), str(ROOT / "src")]
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ.pop("PYTEST_CURRENT_TEST", None)  # with it, hypothesis' example() says a warning that costs a repr of all
MODULES = ("fuzz_recipes", "fuzz_models", "fuzz_bench", "fuzz_server")
HEAVY = ("surespec.judge", "scipy.stats", "surespec.plan", "surespec.local.engine")  # loaded once, before the cases
MEMORY = 2**30
WALL_S = 20.0  # the watchdog inside counts processor time; this one counts what waits
BATCH = 500


def surfaces() -> dict[str, Any]:
    """All surfaces by name."""
    return {s.name: s for module in MODULES for s in importlib.import_module(module).SURFACES}


def _resident() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit_memory() -> None:
    """No case may make this process larger than ``MEMORY``, whatever it has mapped already."""
    room = MEMORY - _resident()
    limit = _address_space() + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def work(name: str, cases: int, seed: int, current: str, channel: Connection) -> None:
    """``_work``; what fails outside of a case is told too."""
    try:
        _work(name, cases, seed, current, channel)
    except Exception as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-1:])
        channel.send(("finding", ("the driver itself", f"{type(error).__name__}: {error!s:.100} {where}", "")))
        raise


def _work(name: str, cases: int, seed: int, current: str, channel: Connection) -> None:
    """Run a surface's cases; report findings as they come, and figures at the end. Runs in a process of its own."""
    from fuzz_harness import Finding, run_case
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # panics of Rust libraries are said there
    surface = surfaces()[name]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_scratch()))
    counts = {"read": 0, "refused": 0, "findings": 0}
    slowest, slow_case = 0.0, ""
    known: set[str] = set()
    note = Path(current)

    def one(case: Any) -> None:
        nonlocal slowest, slow_case
        sys.set_int_max_str_digits(0)  # for cases that hold longer numbers than the parsers may accept
        text = repr(case)
        sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)
        note.write_text(text, encoding="utf-8", errors="surrogatepass")
        channel.send(("case", None))
        begun = time.perf_counter()
        try:
            counts[run_case(surface, case, folder / "case")] += 1
        except Finding as finding:
            counts["findings"] += 1
            if finding.where not in known:
                known.add(finding.where)
                channel.send(("finding", (finding.where, finding.detail, text)))
        spent = time.perf_counter() - begun
        if spent > slowest:
            slowest, slow_case = spent, text

    for heavy in HEAVY:
        importlib.import_module(heavy)
    one(_first(surface))  # what is loaded once is no part of the memory of a case
    _limit_memory()
    done, batch = 1, 0
    while done < cases:
        size = min(BATCH, cases - done)

        @seeded(seed * 100_003 + batch)
        @settings(
            max_examples=size,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(surface.cases)
        def run(case: Any) -> None:
            one(case)

        before = sum(counts.values())
        run()
        done, batch = done + max(1, sum(counts.values()) - before), batch + 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    channel.send(("end", {**counts, "slowest_s": slowest, "slow_case": slow_case, "peak": peak}))


def _first(surface: Any) -> Any:
    import warnings

    from hypothesis.errors import NonInteractiveExampleWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonInteractiveExampleWarning)
        return surface.cases.example()


def _scratch() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def run_surface(name: str, cases: int, seed: int, findings: Path) -> dict[str, Any]:
    """One surface to its end: a child that dies or hangs is a finding, and another one goes on after it."""
    total: dict[str, Any] = {"read": 0, "refused": 0, "findings": 0, "slowest_s": 0.0, "peak": 0, "slow_case": ""}
    context, left, round_ = mp.get_context("forkserver"), cases, 0
    while left > 0:
        with tempfile.NamedTemporaryFile(prefix="fuzz-case-", dir=_scratch()) as current:
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(
                target=work, args=(name, left, seed + 1000 * round_, current.name, theirs), daemon=False
            )
            child.start()
            theirs.close()
            done, end = _listen(name, child, ours, findings)
            child.join(10)
            text = Path(current.name).read_text(encoding="utf-8", errors="surrogatepass")
        if end is not None:
            for key in ("read", "refused", "findings"):
                total[key] += end[key]
            total["peak"] = max(total["peak"], end["peak"])
            if end["slowest_s"] > total["slowest_s"]:
                total["slowest_s"], total["slow_case"] = end["slowest_s"], end["slow_case"]
            break
        why = f"process ended by {child.exitcode}" if not child.is_alive() else f"no end within {WALL_S:g} s"
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
            child.join()
        keep(findings, name, why, "the parser took the whole process with it", text)
        total["findings"] += 1
        total["refused"] += done
        left, round_ = left - max(1, done), round_ + 1
    return total


def _listen(name: str, child: Any, channel: Connection, findings: Path) -> tuple[int, dict[str, Any] | None]:
    """Cases begun, and the child's figures; None when it died or hung."""
    done = 0
    while channel.poll(WALL_S if done else 60.0):
        try:
            kind, said = channel.recv()
        except EOFError:
            return done, None
        if kind == "end":
            return done, said
        if kind == "finding":
            keep(findings, name, *said)
        done += kind == "case"
    return done, None


def keep(folder: Path, name: str, where: str, detail: str, case: str) -> None:
    """Say a finding and save its input."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{len(list(folder.glob(f'{name}-*.txt'))) + 1}.txt"
    path.write_text(case, encoding="utf-8", errors="surrogatepass")
    print(f"  FINDING {name}: {where}\n    {detail!r:.300}\n    {path}", flush=True)


def replay(path: Path) -> int:
    """Saved cases (``SURFACE-NUMBER.txt``, one or a folder of them), in this process, with the whole traceback."""
    from fuzz_harness import run_case

    known = surfaces()
    _limit_memory()
    for file in sorted(path.glob("*.txt")) if path.is_dir() else [path]:
        sys.set_int_max_str_digits(0)
        case = ast.literal_eval(file.read_text(encoding="utf-8", errors="surrogatepass"))
        sys.set_int_max_str_digits(sys.int_info.default_max_str_digits)
        print(file.name, end=": ", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            print(run_case(known[file.stem.rpartition("-")[0]], case, Path(folder) / "case"), flush=True)
    return 0


def main() -> int:
    """Run the surfaces asked for, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000, help="of all surfaces together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--surface", action="append", default=[], help="only this one (may be given several times)")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--replay", type=Path, help="run a saved case, or a folder of them, again")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--jobs", type=int, default=1, help="surfaces at a time")
    given = parser.parse_args()
    known = surfaces()
    unknown = set(given.surface) - set(known)
    if unknown:
        parser.error(f"no surface {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    chosen = {n: s for n, s in known.items() if not given.surface or n in given.surface}
    if given.replay:
        return replay(given.replay)
    shares = sum(s.share for s in chosen.values())
    budget = {n: max(1, round(given.cases * s.share / shares)) for n, s in chosen.items()}
    print(
        f"{'surface':16} {'cases':>7} {'read':>7} {'refused':>8} {'findings':>8} {'slowest s':>9} {'peak MiB':>8} {'s':>6}"
    )
    from concurrent.futures import ThreadPoolExecutor

    mp.get_context("forkserver").set_forkserver_preload(["__main__", *HEAVY, "hypothesis", *MODULES])

    def timed(name: str) -> dict[str, Any]:
        begun = time.perf_counter()
        found = run_surface(name, budget[name], given.seed, given.findings)
        seconds = time.perf_counter() - begun
        cases = found["read"] + found["refused"] + found["findings"]
        print(
            f"{name:16} {cases:7} {found['read']:7} {found['refused']:8} {found['findings']:8} {found['slowest_s']:9.2f} "
            f"{found['peak'] / 2**20:8.0f} {seconds:6.0f}",
            flush=True,
        )
        return {**found, "cases": cases, "seconds": seconds}

    with ThreadPoolExecutor(given.jobs) as pool:
        results = dict(zip(budget, pool.map(timed, budget), strict=True))
    cases = sum(r["cases"] for r in results.values())
    findings = sum(r["findings"] for r in results.values())
    slowest = max(results, key=lambda n: results[n]["slowest_s"])
    peak = max(r["peak"] for r in results.values()) / 2**20
    print(
        f"{cases} cases, {findings} findings, slowest {results[slowest]['slowest_s']:.2f} s ({slowest}), peak {peak:.0f} MiB"
    )
    if given.json:
        given.json.write_text(json.dumps({"seed": given.seed, "surfaces": results}, indent=1) + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

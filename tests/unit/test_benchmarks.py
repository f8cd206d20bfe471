"""The benchmarks without their clocks: flags, the rows they write, and the arithmetic between figure and row."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peerloom.protocol.runspec import RunSpec
from tests.benchmarks import dht, exchange, overhead, pipeline, pipeline_recovery, reach, rows, soak_real, uneven, watch
from tests.benchmarks.ends import EndFailed, Ends
from tests.benchmarks.overhead import Turn
from tests.benchmarks.pipeline_ends import Shares
from tests.benchmarks.rows import Row

KEYS = {"name", "value", "unit", "baseline", "baseline_value", "ratio", "setting"}
TURNS = [Turn(900.0, 0.9, 0.06, 0.04), Turn(950.0, 0.95, 0.03, 0.02)]
BARE_SECONDS = {"grpc, fp32": 0.4, "grpc, bf16": 0.2, "grpc, int8": 0.1}
SECONDS = {"fp32": 0.5, "bf16": 0.25, "int8": 0.2, **BARE_SECONDS, "hivemind": 2.0}


def overhead_rows() -> list[Row]:
    return overhead.rows(RunSpec(), TURNS, [1000.0, 1000.0], (12.0, 6.0), (300 << 20, 200 << 20))


def exchange_rows() -> list[Row]:
    return exchange.rows(25_000_000, SECONDS, 110_000_000, 3)


def dht_rows() -> list[Row]:
    found = [dht.rows(peers, 1200, 24, {"store": (0.02, 0.01), "get": (0.03, 0.02)}) for peers in (16, 64, 256)]
    return [row for each in found for row in each]


def reach_rows() -> list[Row]:
    seconds = {"direct": [0.5, 0.1, 0.5], "relayed": [1.0, 1.0]}
    return reach.rows(10_000_000, 1, seconds, {"direct": [0.002], "relayed": [0.005]})


def soak_rows() -> list[Row]:
    before = soak_real.Sample("trainer", 10.0, 1, 100.0, 30, 5000, 10, 5)
    after = soak_real.Sample("trainer", 90.0, 2, 110.0, 31, 9000, 20, 5)
    return soak_real.growth(before, after, "4 trainers")


def watch_rows() -> list[Row]:
    return watch.rows(5, (60.0, 1), 36.0, 12.0, 0.32, 5.0)


@pytest.mark.parametrize(
    "name",
    ["overhead", "exchange", "dht", "seedflow", "basis_rotation", "reach", "pipeline", "soak", "uneven", "watch"],
)
def test_each_runs_alone_and_names_its_flags(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"tests.benchmarks.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)  # run_module warns of one that is imported
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    usage = capsys.readouterr().out
    assert all(flag in usage for flag in ("--quick", "--full", "--json FILE"))


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (overhead_rows, ["tokens_per_s", "daemon_rss", "join_to_first_step"]),
        (exchange_rows, ["fp32_vs_grpc", "fp32_vs_hivemind", "bf16_vs_grpc", "int8_vs_grpc", "peak_copies"]),
        (reach_rows, ["relay_throughput", "relay_latency_ms"]),
        (soak_rows, ["trainer_rss", "trainer_open_files", "trainer_log_bytes_a_round", "trainer_dht_records"]),
        (
            watch_rows,
            ["status_look", "status_dht_keys", "status_render", "status_frame", "page_core_share", "metrics_scrape"],
        ),
        (dht_rows, ["store_ms", "get_ms", "store_ms_64", "get_ms_64", "store_ms_256", "get_ms_256"]),
    ],
)
def test_rows_are_written_as_the_design_says(
    made: Callable[[], list[Row]],
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[argparse.Namespace] = []

    def measure(arguments: argparse.Namespace) -> list[Row]:
        asked.append(arguments)
        return made()

    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", "--quick", "--json", str(file)])
    rows.main("a benchmark", measure)
    assert asked[0].quick and not asked[0].full
    written: list[dict[str, Any]] = json.loads(file.read_text())
    assert [row["name"] for row in written] == names
    assert all(row.keys() == KEYS and row["setting"] and row["baseline"] and row["unit"] for row in written)
    assert all(row["ratio"] == row["value"] / row["baseline_value"] for row in written)
    assert [rows.machine() in row["setting"] for row in written] == [True] + [False] * (len(names) - 1)
    assert all(name in capsys.readouterr().out for name in names[:1])


def test_the_figures_of_the_rows() -> None:
    assert [round(row.ratio, 6) for row in overhead_rows()] == [0.925, 1.5, 2.0]
    rate, against_hivemind, bf16, int8, peak = exchange_rows()
    assert (rate.value, rate.baseline_value) == (400.0, 500.0)
    assert (against_hivemind.ratio, bf16.value, bf16.baseline_value, peak.value) == (4.0, 400.0, 500.0, 1.1)
    assert (round(int8.value), int8.ratio) == (258, 0.5)  # a scale every 128 numbers comes along
    assert [row.value for row in dht_rows()[:2]] == [20.0, 30.0]
    throughput, latency = reach_rows()
    assert (throughput.value, throughput.ratio) == (80.0, 0.5)
    assert (round(latency.value, 6), latency.baseline_value) == (3.0, 2.0)


def event(at: float, tokens: int, partner: str | None = "p") -> dict[str, Any]:
    reason = "" if partner else "nobody there"
    return {
        "t": at, "tokens": tokens, "partner": partner, "train_s": 0.8, "exchange_s": 0.1, "alone_because": reason
    }  # fmt: skip


def test_a_turn_begins_where_its_first_round_ended() -> None:
    turn = overhead.node_turn([event(100.0, 5000), event(101.0, 6000), event(102.0, 7000, None)], Path("log"))
    assert turn.rate == 1000.0
    assert (turn.training, turn.exchange, turn.rest) == pytest.approx((0.8, 0.1, 0.1))


def test_a_turn_of_lonely_rounds_is_no_figure() -> None:
    with pytest.raises(ValueError, match="nobody there"):
        overhead.node_turn([event(100.0, 5000), event(101.0, 6000, None)], Path("log"))


def test_the_bare_rate_is_from_its_first_line_to_its_last() -> None:
    assert overhead.bare_rate([(5, 10.0), (10, 11.0), (15, 12.0)], 100) == 500.0
    with pytest.raises(ValueError, match="too busy"):
        overhead.bare_rate([(5, 10.0)], 100)


def double(pipe: Any, by: int) -> None:
    while True:
        pipe.send(pipe.recv() * by)


def fail(pipe: Any) -> None:
    raise ZeroDivisionError("on purpose")


def test_ends_answer_in_turn_and_are_gone_afterwards() -> None:
    with Ends(double, [(2,), (3,)]) as ends:
        assert ends.turn(5) == [10, 15]
        ends.tell([1, 2])
        assert ends.answers() == [2, 6]
        processes = ends._processes
    assert [process.exitcode for process in processes] == [0, 0]


def test_an_end_that_raises_is_told_with_its_traceback() -> None:
    with Ends(fail, [()]) as ends, pytest.raises(EndFailed, match="on purpose"):
        ends.answers()


def test_utilization_is_the_less_busy_stages_median_over_turns(tmp_path: Path) -> None:
    clock = {
        ("async", 20): [(0.9, 1.0), (0.95, 0.97), (0.96, 0.92)],
        ("sync", 20): [(0.5, 0.4), (0.6, 0.45), (0.4, 0.5)],
    }
    found: Any = {key: [Shares(each, (each[0] - 0.1, each[1] - 0.2)) for each in turns] for key, turns in clock.items()}
    (tmp_path / "text").mkdir()
    spec = pipeline.spec(tmp_path, "async", 8)
    by_clock, by_cpu = pipeline.rows_of(20, found, spec)
    assert (by_clock.name, by_clock.value, by_clock.baseline_value) == ("utilization_async_20ms", 0.95, 0.45)
    assert "async 0.950 and 0.970, sync 0.500 and 0.450" in by_clock.setting
    assert "8 microbatches an update, window 16, each of 1 x 128" in by_clock.setting
    assert (by_cpu.name, by_cpu.value) == ("utilization_cpu_async_20ms", pytest.approx(0.77))
    plain = pipeline.rows_of(20, found, pipeline.spec(tmp_path, "async", 1))
    assert [row.name for row in plain] == ["utilization_async_20ms_default", "utilization_cpu_async_20ms_default"]
    assert "1 microbatches an update, window 2, each of 8 x 128" in plain[0].setting


def a_run(recoveries: list[float], off: float, dip: float = 0.0) -> pipeline_recovery.Run:
    """A loss that falls from 4, a little off, more so around update 100."""
    curve = [(update, 4 - update / 100 + off + dip * (60 < update <= 110)) for update in range(10, 201, 10)]
    stages = pipeline_recovery.stages_to_kill(len(recoveries))
    return pipeline_recovery.Run(stages, recoveries, curve, curve, 60.0, "a machine")


def test_a_run_with_kills_is_held_against_the_noise_of_those_without(tmp_path: Path) -> None:
    quiet = [a_run([], off) for off in (0.0, 0.02)]
    near, far = (pipeline_recovery.loss_row(a_run([5.0, 6.0], off), quiet) for off in (0.04, 0.1))
    assert (near.value, near.baseline_value) == (pytest.approx(2.24), pytest.approx(2.21))
    assert "deviation 0.0141" in near.setting and "0.0300 apart at the end" in near.setting
    assert "0.0300 where they are farthest, within 3" in near.setting
    assert "0.0900 where they are farthest, NOT within 3" in far.setting
    healed = pipeline_recovery.loss_row(a_run([5.0, 6.0], 0.01, dip=0.1), quiet).setting
    assert "0.0000 apart at the end" in healed and "NOT within 3" in healed, "it was off on the way"
    file = tmp_path / "results" / "recovery.jsonl"
    for run in (*quiet, replace(a_run([9.0, 9.0], 0.04), stages=[1, 1]), a_run([5.0, 6.0], 0.04)):
        pipeline_recovery.keep(file, run)
    rows = pipeline_recovery.recovery_rows(2, 2, file)
    assert [(row.name, row.value) for row in rows] == [("recovery_s", 6.0), ("recovery_loss", near.value)]


def test_each_stage_is_killed_and_no_kill_may_take_longer_than_allowed() -> None:
    assert pipeline_recovery.stages_to_kill(1) == [1]
    assert pipeline_recovery.stages_to_kill(3) == [1, 2, 3]
    ten = pipeline_recovery.stages_to_kill(10)
    assert ten[:4] == [1, 2, 3, 0] and len(ten) == 10 and set(ten[4:]) <= set(range(4)) and len(set(ten[4:])) > 1
    row = pipeline_recovery.recovery_row(a_run([5.0, 6.0, 14.0], 0.0))
    assert (row.value, row.unit) == (14.0, "s, the longest") and "median 6.0 s, 2 within 10 s" in row.setting
    assert "NOT within" in pipeline_recovery.recovery_row(a_run([5.0, 6.0, 14.1], 0.0)).unit


def test_a_copy_counts_that_is_newer_than_the_kill_before(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run" / "stage-002" / "checkpoints" / "round-000040"
    folder.mkdir(parents=True)
    os.utime(folder, (1000.0, 1000.0))
    assert pipeline_recovery.has_copy(tmp_path, 2, 0.0) and pipeline_recovery.has_copy(tmp_path, 2, 999.0)
    assert not pipeline_recovery.has_copy(tmp_path, 2, 1001.0) and not pipeline_recovery.has_copy(tmp_path, 1, 0.0)


def journal(home: Path, *rounds: int) -> None:
    """A node's journal: rounds that end a second apart and wait a tenth of it, and a line that is being written."""
    file = home / "runs" / "id" / "metrics.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"event": "started"}), ""]
    lines += [json.dumps({"event": "round", "round": r, "t": float(r), "exchange_s": 0.1}) for r in rounds]
    file.write_text("\n".join(lines) + '\n{"event": "rou', encoding="utf-8")


class Restarted:
    """Stands in for a session that is killed."""

    output = Path("out")
    killed = 0

    def kill(self) -> None:
        Restarted.killed += 1


def test_an_uneven_node_waits_for_the_share_that_its_rounds_tell(tmp_path: Path) -> None:
    journal(tmp_path, 1, 2, 3, 5)
    node = uneven.Node("node-0", [], tmp_path, slow=False, session=None, stack=ExitStack())  # type: ignore[arg-type]
    assert [event["round"] for event in node.rounds()] == [1, 2, 3, 5]
    assert uneven.waiting_share(node.rounds()) == pytest.approx(0.3 / 4)  # the first round's began before
    with pytest.raises(ValueError, match="too few rounds"):
        uneven.waiting_share(node.rounds()[:1])


def test_a_kill_is_held_against_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uneven, "Session", lambda *arguments: nullcontext(Restarted()))
    journal(tmp_path, 1, 2, 3)
    with ExitStack() as stack:
        node = uneven.Node("node-0", [], tmp_path, False, Restarted(), stack)  # type: ignore[arg-type]
        assert node.newest_checkpoint() == -1
        for round in (2, 10, 9):
            (tmp_path / "runs" / "id" / "checkpoints" / f"round-{round}").mkdir(parents=True)
        assert node.kill_and_restart() == (10, 3) and Restarted.killed == 1
    # it tells of round 4 next: 10 is lost
    clock = iter([0.0, 1.0, 99.0])
    monkeypatch.setattr(uneven.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(uneven, "_pass", lambda nodes, seconds: None)
    monkeypatch.setattr(uneven, "_until", lambda nodes, done, timeout_s: journal(tmp_path, 1, 2, 3, 4))
    assert uneven._kill_in_turn([node], 50.0) == 1
    assert node.lost == ["node-0 came back at round 4 with a checkpoint of round 10"]


def test_uneven_rows_are_of_the_worst_fast_node_and_of_all_losses() -> None:
    waits, losses = [0.01, 0.03, 0.02, 0.4], [1.5, 1.25, 1.375, 1.3125]
    waiting, spread, lost = uneven._rows(uneven.Scale(4, 1, 2, 3), waits, losses, 9, ["node-1 came back too early"])
    assert (waiting.value, waiting.baseline_value) == (0.03, 0.4) and "median of the fast ones 0.020" in waiting.setting
    assert (spread.value, spread.baseline_value) == (0.25, 1.25) and "after 9 kills" in spread.setting
    assert (lost.value, lost.baseline_value, lost.setting) == (1, 9, "node-1 came back too early")
    assert uneven._rows(uneven.QUICK, waits, losses, 0, [])[2].value == 0

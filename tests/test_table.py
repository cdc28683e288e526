"""The dispatch table on disk and in memory: damage, writing, merging, matching."""

import difflib
import json
import logging
import multiprocessing
import os
from dataclasses import replace

import pytest
from click.testing import CliRunner

from ktune.cli import cli
from ktune.device import COMPILE_TARGETS, Device
from ktune.errors import TableError, TemplateError
from ktune.operations import operation, parse_problem
from ktune.table import (
    DamagedTableError,
    Entry,
    Matcher,
    Provenance,
    Table,
    check_writable,
    lookup,
    merge,
    read_table,
    update_table,
)
from ktune.table import store as store_module
from ktune.variant import Variant

H200 = Device("NVIDIA H200", "cuda", "sm_90", 132, 232_448, 60 << 20, 140)
MIG = Device("NVIDIA H200 MIG 1g.18gb / odd", "cuda", "sm_90", 16, 232_448, 8 << 20, 16)


def provenance(**changes):
    values = {
        "latency_ms": 0.5,
        "spread_ms": 0.01,
        "default_latency_ms": 0.6,
        "margin": 0.2,
        "is_default": False,
        "samples": 100,
        "protocol": "cuda-events",
        "measured": "2026-01-31",
        "trials": 40,
        "versions": {"triton": "3.6.0"},
        "baselines": {"torch": 0.7},
    }
    return Provenance(**(values | changes))


def entry(problem="softmax m=64 n=1000", device=H200, source_id="abc", covers=None, **changes):
    problem = parse_problem(problem)
    variant = operation(problem.op).default_variant(problem, device)
    return Entry(device.key, problem, variant, source_id, provenance(**changes), covers or {})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "table.json"


def test_round_trip(path):
    written = update_table(path, [entry(), entry("softmax m=1 n=8", MIG)], [H200, MIG])
    assert read_table(path) == written
    assert len(written) == 2
    assert written.get(H200, parse_problem("softmax m=64 n=1000")) == entry()


def test_file_is_reviewable(path):
    update_table(path, [entry(), entry("softmax m=1 n=8")], [H200])
    data = path.read_bytes()
    assert data.endswith(b"}\n") and b"\r" not in data
    whole = json.loads(data)
    assert whole["schema"] == 1
    assert data.decode() == json.dumps(whole, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    before = data.decode().splitlines()
    update_table(path, [entry("softmax m=2 n=8")])
    after = path.read_text("utf-8").splitlines()
    changed = {line[0] for line in difflib.ndiff(before, after)}
    assert changed == {" ", "+"}, "lines are added, none changes"


def test_regions_are_written_on_a_line_each_and_read_back(path):
    covers = {"m": (33, 65536), "n": (513, 1023)}
    update_table(path, [entry(covers=covers), entry("softmax m=1 n=8")])
    text = path.read_text("utf-8")
    assert '"covers": {\n          "m": [33, 65536],\n          "n": [513, 1023]\n' in text
    assert text.count("covers") == 1, "a table without regions is as it always was"
    assert read_table(path).get(H200, entry().problem) == entry(covers=covers)
    assert read_table(path).to_json() == text


def test_later_entry_replaces_and_others_stay(path):
    update_table(path, [entry(), entry("softmax m=1 n=8")])
    update_table(path, [entry(latency_ms=0.1)])
    table = read_table(path)
    assert len(table) == 2
    assert table.get(H200, entry().problem).provenance.latency_ms == 0.1


def test_merge_lets_the_newer_win():
    a, b = Table.of([entry(), entry("softmax m=1 n=8")]), Table.of([entry(latency_ms=0.1)], [H200])
    merged = merge(a, b)
    assert len(merged) == 2 and merged.devices == {H200.key: H200.to_dict()}
    assert merged.get(H200, entry().problem).provenance.latency_ms == 0.1
    with pytest.raises(TypeError):
        merged.entries["x", "y"] = entry()


def sound_json():
    return json.loads(Table.of([entry()], [H200]).to_json())


def edited(edit):
    whole = sound_json()
    edit(whole, next(iter(whole["entries"][H200.key].values())))
    return json.dumps(whole).encode()


WHOLE = Table.of([entry()], [H200]).to_json().encode()
DAMAGED = {
    "empty": b"",
    "half": WHOLE[: len(WHOLE) // 2],
    "utf8": WHOLE.replace(b"NVIDIA", b"\xff\xfeNVI"),
    "list": b"[]",
    "null": b"null",
    "word": b"true",
    "spaces": b" " * 1000,
    "deep": b"[" * 200_000,
    "digits": b'{"schema": ' + b"1" * 5000 + b"}",
    "object": b"{}",
    "nan": WHOLE.replace(b"0.5", b"NaN"),
    "infinite": WHOLE.replace(b"0.5", b"1e999"),
    "key twice": WHOLE.replace(b'"schema": 1', b'"schema": 1, "schema": 1'),
    "unknown key": edited(lambda whole, _: whole.update(extra=1)),
    "no entries": edited(lambda whole, _: whole.pop("entries")),
    "entries list": edited(lambda whole, _: whole.update(entries=[])),
    "device list": edited(lambda whole, _: whole["entries"].update({H200.key: []})),
    "device fields": edited(lambda whole, _: whole["devices"][H200.key].update(extra=1)),
    "device other": edited(lambda whole, _: whole["devices"][H200.key].update(sm_count=1)),
    "entry key": edited(lambda _, e: e.update(extra=1)),
    "entry null": edited(lambda whole, e: whole["entries"][H200.key].update({"softmax m=1": None})),
    "problem": edited(lambda whole, e: whole["entries"][H200.key].update({"softmax m 1": e})),
    "problem text": edited(lambda whole, e: whole["entries"][H200.key].update({"": e})),
    "variant number": edited(lambda _, e: e.update(variant=3)),
    "variant text": edited(lambda _, e: e.update(variant="one_tile num_warps=many")),
    "variant empty": edited(lambda _, e: e.update(variant=" ")),
    "latency": edited(lambda _, e: e["provenance"].update(latency_ms="fast")),
    "latency bool": edited(lambda _, e: e["provenance"].update(latency_ms=True)),
    "flag": edited(lambda _, e: e["provenance"].update(is_default=1)),
    "versions": edited(lambda _, e: e["provenance"].update(versions={"triton": 3})),
    "baselines": edited(lambda _, e: e["provenance"].update(baselines={"torch": "1"})),
    "provenance": edited(lambda _, e: e["provenance"].pop("samples")),
    "covers list": edited(lambda _, e: e.update(covers=[1, 2])),
    "covers null": edited(lambda _, e: e.update(covers=None)),
    "covers no field": edited(lambda _, e: e.update(covers={"k": [1, 2]})),
    "covers a word": edited(lambda _, e: e.update(covers={"dtype": [1, 2]})),
    "covers one": edited(lambda _, e: e.update(covers={"m": [64]})),
    "covers a number": edited(lambda _, e: e.update(covers={"m": 64})),
    "covers floats": edited(lambda _, e: e.update(covers={"m": [1.0, 64.0]})),
    "covers flags": edited(lambda _, e: e.update(covers={"m": [True, 64]})),
    "covers backwards": edited(lambda _, e: e.update(covers={"m": [70, 60]})),
    "covers negative": edited(lambda _, e: e.update(covers={"m": [-1, 64]})),
    "covers not itself": edited(lambda _, e: e.update(covers={"m": [65, 128]})),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_table_is_named_and_healed(content, path, caplog):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(
        DamagedTableError, match=r"table\.json: the table is damaged: .+ktune search"
    ):
        read_table(path)
    with caplog.at_level(logging.WARNING):
        update_table(path, [entry()])
    assert read_table(path) == Table.of([entry()])
    assert path.with_name("table.json.damaged-1").read_bytes() == content
    assert len(caplog.records) == 1 and str(path) in caplog.text
    assert not list(path.parent.glob("*.tmp"))


def test_second_damage_keeps_the_first(path):
    path.parent.mkdir()
    for n in (1, 2):
        path.write_text(f"damage {n}")
        update_table(path, [entry()])
    assert path.with_name("table.json.damaged-1").read_text() == "damage 1"
    assert path.with_name("table.json.damaged-2").read_text() == "damage 2"


def test_huge_file_is_refused_unread(path, monkeypatch):
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(1 << 30)
    monkeypatch.setattr(type(path), "read_bytes", lambda self: pytest.fail("it was read"))
    with pytest.raises(DamagedTableError, match="1073741824 bytes"):
        read_table(path)


def test_another_schema_is_refused_and_left_alone(path):
    path.parent.mkdir()
    content = WHOLE.replace(b'"schema": 1', b'"schema": 2')
    path.write_bytes(content)
    for act in (read_table, check_writable, lambda p: update_table(p, [entry()])):
        with pytest.raises(TableError, match=r"table\.json: schema 2 is not known"):
            act(path)
    assert path.read_bytes() == content


def test_absent_file_and_folder_as_file(tmp_path):
    with pytest.raises(TableError, match="there is no table"):
        read_table(tmp_path / "none.json")
    with pytest.raises(TableError, match="must be a file"):
        read_table(tmp_path)
    for act in (check_writable, lambda p: update_table(p, [entry()])):
        with pytest.raises(TableError, match=str(tmp_path)):
            act(tmp_path)
    blocker = tmp_path / "blocker"
    blocker.write_text("a file")
    for act in (check_writable, lambda p: update_table(p, [entry()])):
        with pytest.raises(TableError, match=r"blocker.*cannot write.*KTUNE_TABLE_PATH"):
            act(blocker / "table.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(path):
    update_table(path, [entry()])
    path.parent.chmod(0o555)
    try:
        with pytest.raises(TableError, match="KTUNE_TABLE_PATH"):
            check_writable(path)
        assert len(read_table(path)) == 1
    finally:
        path.parent.chmod(0o755)


def test_full_disk_leaves_the_old_table(path, monkeypatch):
    update_table(path, [entry()])
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module.os, "fsync", full)
    with pytest.raises(TableError, match=r"table\.json: cannot write the table: No space left"):
        update_table(path, [entry("softmax m=1 n=8")])
    assert path.read_bytes() == before and not list(path.parent.glob(".*tmp"))


def test_what_a_killed_writer_left_is_no_obstacle(path):
    update_table(path, [entry()])
    path.with_name(".table.json.tmp").write_text("half")
    update_table(path, [entry("softmax m=1 n=8")])
    assert len(read_table(path)) == 2 and not list(path.parent.glob(".*tmp"))


def test_held_lock_is_an_error_with_a_limit(path, monkeypatch):
    monkeypatch.setattr(store_module, "LOCK_TIMEOUT_S", 0.05)
    path.parent.mkdir()
    with (
        store_module.filelock.FileLock(path.with_name("table.json.lock"), thread_local=False),
        pytest.raises(TableError, match="another process"),
    ):
        check_writable(path)


def test_check_writable_leaves_no_table(path):
    check_writable(path)
    assert not path.exists() and not list(path.parent.glob("*.tmp"))
    check_writable(path)


def test_mode_follows_the_umask_and_links_are_followed(path, tmp_path):
    before = os.umask(0o022)
    try:
        link = tmp_path / "link.json"
        path.parent.mkdir()
        link.symlink_to(path)
        update_table(link, [entry()])
    finally:
        os.umask(before)
    assert link.is_symlink() and len(read_table(path)) == 1
    assert path.stat().st_mode & 0o777 == 0o644


def _write_one(path, n):
    update_table(path, [entry(f"softmax m={n} n=8")])


def test_many_writers_lose_nothing(path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_one, args=(path, n)) for n in range(1, 9)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(read_table(path)) == 8


def test_unknown_operation_is_kept(path):
    update_table(path, [entry()])
    text = path.read_text("utf-8").replace('"softmax m', '"theirs m')
    path.write_text(text, "utf-8")
    update_table(path, [entry()])
    assert sorted(e.problem.op for e in read_table(path)) == ["softmax", "theirs"]


# --- matching ---------------------------------------------------------------------------------


def find(problem, *tables, device=H200, source_id=None):
    return lookup(tables, device, parse_problem(problem), source_id)


def test_exact_then_bucket_then_default():
    table = Table.of([entry("softmax m=4096 n=1000"), entry("softmax m=4000 n=1000")])
    assert find("softmax m=4000 n=1000", table).kind == "exact"
    match = find("softmax m=3990 n=1008", table)
    assert match.kind == "bucket" and match.entry.problem.size("m") == 4000
    assert match.variant == match.entry.variant
    match = find("softmax m=64 n=1000", table)
    assert match.kind == "default" and match.entry is None and match.table is None
    assert match.variant == operation("softmax").default_variant(
        parse_problem("softmax m=64 n=1000"), H200
    )


def test_few_rows_never_stand_for_many():
    table = Table.of([entry(f"softmax m={m} n=4096") for m in (1, 2, 4, 8)])
    for m in (2048, 8192):
        assert find(f"softmax m={m} n=4096", table).kind == "default"


def test_first_table_wins_but_exact_beats_bucket():
    problem = "softmax m=64 n=1000"
    first, second = Table.of([entry(problem)]), Table.of([entry(problem, latency_ms=0.1)])
    assert find(problem, first, second).table == 0
    bucket = Table.of([entry("softmax m=63 n=1000")])
    match = find(problem, bucket, second)
    assert (match.kind, match.table) == ("exact", 1)
    match = find("softmax m=60 n=1000", bucket, Table.of([entry("softmax m=60 n=999")]))
    assert (match.kind, match.table) == ("bucket", 0)


def test_ties_are_settled_the_same_way_in_any_order():
    entries = [entry(f"softmax m={m} n=1000") for m in (120, 100, 80)]
    for order in (entries, entries[::-1]):
        assert find("softmax m=110 n=1000", Table.of(order)).entry.problem.size("m") == 120


def test_lse_is_no_difference():
    text = "attention heads=8 seqlen_q=1024 head_dim=64"
    match = find(f"{text} return_lse=true", Table.of([entry(text)]))
    assert match.kind == "bucket" and match.entry == entry(text)


@pytest.mark.parametrize(
    "other",
    [
        Device(H200.name, "cuda", "sm_100", 132, 232_448, 60 << 20, 140),
        Device("NVIDIA H100", "cuda", "sm_90", 132, 232_448, 60 << 20, 140),
        MIG,
        COMPILE_TARGETS["gfx942"],
    ],
    ids=lambda d: d.key,
)
def test_another_device_is_never_used(other):
    match = find("softmax m=64 n=1000", Table.of([entry(device=other)]))
    assert match.kind == "default"
    assert match.nearest.differs == {"device": (H200.key, other.key)}
    message = match.message(H200, parse_problem("softmax m=64 n=1000"))
    assert other.key in message and H200.key in message


def test_nearest_and_message():
    table = Table.of([entry("softmax m=64 n=1000", MIG), entry("softmax m=64 n=9000")])
    match = find("softmax m=64 n=1000", table)
    assert match.nearest.differs == {"n": (1000, 9000)}
    text = match.message(H200, parse_problem("softmax m=64 n=1000"))
    fields = "m=64 n=1000 dtype=bfloat16 layout=rows"
    assert text == (
        f"no entry for softmax {fields} on {H200.key}; nearest is "
        "softmax m=64 n=9000 dtype=bfloat16 layout=rows (differs: n). "
        f'Run: ktune search softmax --problem "{fields}"'
    )
    assert find("softmax m=1 n=1").nearest is None


def test_stale_entries_are_passed_over():
    exact, near = entry("softmax m=64 n=1000", source_id="old"), entry("softmax m=63 n=1000")
    calls = []

    def source_id(variant, problem):
        calls.append(problem.text)
        return "abc"

    match = find("softmax m=64 n=1000", Table.of([exact, near]), source_id=source_id)
    assert match.kind == "bucket" and match.entry == near
    assert match.stale[0].entry == exact and "'old'" not in match.stale[0].reason
    assert "old" in match.stale[0].reason and "abc" in match.stale[0].reason
    assert calls == [exact.problem.text, near.problem.text], "each for its own problem"


def test_entry_that_no_longer_renders_is_stale():
    def source_id(variant, problem):
        raise TemplateError("no such template")

    match = find("softmax m=64 n=1000", Table.of([entry()]), source_id=source_id)
    assert match.kind == "default" and "no such template" in match.stale[0].reason
    assert "no such template" in match.message(H200, entry().problem)


def test_fields_of_another_ktune_do_not_break_the_search():
    text = Table.of([entry()]).to_json().replace("layout=rows", "colour=red")
    match = find("softmax m=64 n=1000", Table.from_json(text))
    assert match.kind == "default"
    assert match.nearest.differs == {"layout": ("rows", "absent")}


# --- regions and batches ----------------------------------------------------------------------

WIDE = {"m": (33, 65536), "n": (513, 1023)}


def test_region_stands_between_exact_and_bucket():
    wide = entry("softmax m=64 n=1000", covers=WIDE)
    near = entry("softmax m=4000 n=904")
    table = Table.of([wide, near])
    assert find("softmax m=64 n=1000", table).kind == "exact"
    assert find("softmax m=4000 n=904", table).kind == "exact"
    match = find("softmax m=4090 n=912", table)
    assert (match.kind, match.entry) == ("region", wide)
    assert find("softmax m=4090 n=1024", table).entry == near, "another structure: its bucket"
    assert find("softmax m=32 n=1000", table).kind == "nearest"
    for outside in ("m=65537 n=1000", "m=64 n=512", "m=64 n=1025"):
        assert find(f"softmax {outside}", table).kind == "default"


def test_odd_rows_and_aligned_ones_share_no_entry_but_an_exact_one():
    """A kernel that reads 16 bytes at a time is no choice for rows that begin anywhere."""
    wide = {"m": (1, 65536), "n": (513, 1023)}
    aligned, odd = entry("softmax m=64 n=1000", covers=wide), entry("softmax m=64 n=1001")
    assert find("softmax m=64 n=1001", Table.of([aligned])).kind == "default"
    assert find("softmax m=64 n=1004", Table.of([aligned])).kind == "default"
    assert find("softmax m=64 n=1004 dtype=float32", Table.of([aligned])).kind == "default"
    assert find("softmax m=64 n=1000", Table.of([odd])).kind == "default"
    assert find("softmax m=64 n=1001", Table.of([aligned, odd])).entry == odd
    assert find("softmax m=64 n=1003", Table.of([aligned, odd])).entry == odd


def test_nearest_is_the_same_kernel_or_one_that_serves_and_not_far():
    table = Table.of([entry("softmax m=64 n=1000")])
    for m, kind in ((16, "nearest"), (15, "default"), (256, "nearest"), (257, "default")):
        match = find(f"softmax m={m} n=1000", table)
        assert match.kind == kind, m
    text = find("softmax m=256 n=1000", table).message(H200, parse_problem("softmax m=256 n=1000"))
    assert "nearest is softmax m=64 n=1000" in text and "ktune search softmax" in text
    long = Variant.parse("softmax", "streaming block_n=16384 lanes=64 rescale=always num_warps=8")
    table = Table.of([replace(entry("softmax m=64 n=65536"), variant=long)])
    kinds = {
        n: find(f"softmax m=64 n={n}", table).kind
        for n in (131072, 262144, 524288, 100000, 100001, 32768, 16384)
    }
    assert kinds == {
        131072: "nearest",
        262144: "nearest",
        524288: "default",  # eight times as long
        100000: "nearest",
        100001: "default",  # odd: two bytes at a time
        32768: "nearest",
        16384: "default",  # one tile's
    }


def test_region_is_of_its_own_flags_and_device():
    wide = entry("softmax m=64 n=1000", covers=WIDE)
    near = entry("softmax m=4000 n=904")
    table = Table.of([wide, near])
    assert find("softmax m=5000 n=1000 dtype=float32", table).kind == "default"
    assert find("softmax m=5000 n=1000", table, device=MIG).kind == "default"
    assert find("softmax m=4090 n=912", Table.of([near]), Table.of([wide])).kind == "region"


def test_a_size_that_a_region_does_not_name_is_the_problems_own():
    table = Table.of([entry("softmax m=64 n=1000", covers={"m": (1, 4096)})])
    assert find("softmax m=4000 n=1000", table).kind == "region"
    assert find("softmax m=4000 n=999", table).kind == "default"


def test_nearest_region_first_and_ties_by_text():
    a = entry("softmax m=64 n=1000", covers=WIDE)
    b = entry("softmax m=4096 n=1000", covers=WIDE)
    for order in ([a, b], [b, a]):
        assert find("softmax m=100 n=1000", Table.of(order)).entry == a
        assert find("softmax m=2000 n=1000", Table.of(order)).entry == b
        assert find("softmax m=512 n=1000", Table.of(order)).entry == b, "half way: by text"


def test_stale_region_is_passed_over_once():
    table = Table.of([entry(covers=WIDE, source_id="old")])
    match = find("softmax m=60 n=1000", table, source_id=lambda *_: "new")
    assert match.kind == "default" and len(match.stale) == 1, "region and bucket are one entry"


def test_region_of_attention_ignores_the_lse_and_keeps_the_mask():
    text = "attention heads=8 seqlen_q=1024 head_dim=64"
    names = ("batch", "heads", "heads_kv", "seqlen_q", "seqlen_k")
    table = Table.of([entry(text, covers=dict.fromkeys(names, (1, 4096)))])
    assert find("attention heads=16 seqlen_q=64 head_dim=64", table).kind == "region"
    assert find("attention heads=16 seqlen_q=64 head_dim=64 return_lse=true", table).kind == (
        "region"
    )
    for other in ("head_dim=64 causal=upper_left", "head_dim=128", "head_dim=63"):
        assert find(f"attention heads=16 seqlen_q=64 {other}", table).kind == "default"


def variant_of(block_m):
    return Variant.parse("softmax", f"one_tile block_m={block_m} eviction=none num_warps=4")


def chosen(m, *tables, n=1000, source_id=None):
    problem = parse_problem(f"softmax m={m} n={n}")
    return Matcher(tables, source_id).match(H200, problem, batch_invariant=True)


def test_batch_invariant_look_up_ignores_the_batch():
    entries = [
        replace(entry(f"softmax m={m} n=1000"), variant=variant_of(block))
        for m, block in ((1, 1), (64, 2), (4096, 8), (8, 4))
    ]
    for order in (entries, entries[::-1]):
        found = {chosen(m, Table.of(order)).variant for m in (1, 2, 8, 64, 1000, 4096, 10**6)}
        assert found == {variant_of(8)}, "the largest batch is first, for every batch"
        match = chosen(64, Table.of(order))
        assert match.kind == "exact" and match.batch_invariant
    assert lookup([Table.of(entries)], H200, entry().problem).variant == variant_of(2)


def test_batch_invariant_regions_buckets_and_default():
    a = replace(entry("softmax m=64 n=600", covers=WIDE), variant=variant_of(2))
    b = replace(entry("softmax m=512 n=1000", covers=WIDE), variant=variant_of(8))
    ms = (1, 7, 32, 64, 4096, 10**7)
    for order in ([a, b], [b, a]):
        matches = [chosen(m, Table.of(order), n=904) for m in ms]
        assert {(x.kind, x.entry.problem.text) for x in matches} == {("region", b.problem.text)}
        matches = [chosen(m, Table.of(order), n=1024) for m in ms]
        assert {(x.kind, x.entry.problem.text) for x in matches} == {("bucket", b.problem.text)}
        assert {chosen(m, Table.of(order), n=4096).kind for m in ms} == {"default"}


def test_batch_invariant_default_is_that_of_one_batch(monkeypatch):
    op = operation("softmax")
    monkeypatch.setattr(op, "default_variant", lambda p, _: variant_of(p.size("m")), raising=False)
    assert {chosen(m).variant for m in (1, 8, 64)} == {variant_of(1)}
    assert find("softmax m=8 n=1000").variant == variant_of(8)


def test_batch_invariant_staleness_is_the_same_for_every_batch():
    entries = [entry(f"softmax m={m} n=1000", source_id=f"s{m}") for m in (8, 64)]
    found = [chosen(m, Table.of(entries), source_id=lambda *_: "s8") for m in (8, 64, 100)]
    assert {x.entry.problem.size("m") for x in found} == {8}
    assert {len(x.stale) for x in found} == {1}


def test_batch_invariant_passes_over_rows_that_decide_together():
    text = "softmax m=64 n=4096 layout=strided"
    words = "block_n=512 loop_stages=1 rescale=conditional rescale_granularity={} num_warps=8"
    for granularity, kind in (("tile", "default"), ("row", "exact")):
        variant = Variant.parse("softmax", f"streaming block_m=8 {words.format(granularity)}")
        table = Table.of([replace(entry(text), variant=variant)])
        match = Matcher([table]).match(H200, parse_problem(text), batch_invariant=True)
        assert match.kind == kind
        assert find(text, table).kind == "exact"
    variant = Variant.parse("softmax", f"streaming lanes=64 {words.format('tile')}")
    table = Table.of([replace(entry("softmax m=64 n=9000"), variant=variant)])
    assert chosen(1, table, n=9000).kind == "exact", "one row in a program"


def test_show_is_by_region_where_that_is_shorter(path):
    entries = [entry(f"softmax m={m} n=1000", covers=WIDE) for m in (64, 512, 4096)]
    update_table(path, [*entries, entry("softmax m=1 n=8")], [H200])
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["table", "show", str(path)])
    assert "m=33..65536 n=513..1023" in shown.output and shown.output.count("one_tile") == 2
    each = CliRunner().invoke(cli, ["table", "show", "--each", str(path)])
    assert each.output.count("one_tile") == 4

"""All candidates of a site with their scores: in the dump, and as a table."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

import commpass
from commpass import Policy, Rule
from commpass.cli import app
from commpass.errors import CommpassError
from commpass.plan import dump
from commpass.report.candidate_table import candidates, considered, lost

ops = torch.ops._c10d_functional


def function(x):
    for _ in range(2):
        x = ops.wait_tensor(ops.all_reduce(torch.relu(x), "sum", "0"))
    return ops.wait_tensor(ops.all_gather_into_tensor(x, 8, "0"))


@pytest.fixture
def dumped(fake_group, tmp_path):
    def write(policy="balanced", profile="ethernet-1g", **more):
        fake_group(8)
        backend = commpass.backend(
            policy, inner="eager", profile=profile, dump=tmp_path, strict=True, **more
        )
        torch.compile(function, backend=backend)(torch.randn(512, 512))
        return dump.read_run(tmp_path)

    return write


def explained(folder, *arguments, width=200):
    return CliRunner().invoke(
        app, ["explain", str(folder), *arguments], env={"COLUMNS": str(width)}
    )


@pytest.mark.slow
def test_dump_has_every_candidate_once_for_sites_that_have_the_same(dumped):
    (one,) = dumped()
    assert [each.sites for each in one.considered] == [
        ("all_reduce", "all_reduce_1"),
        ("all_gather_into_tensor",),
    ]
    for each in one.considered:
        alone, *others = each.candidates
        assert (alone.codec, alone.algorithm) == ("none", "none")
        named = {(other.codec, other.algorithm) for other in others}
        assert len(named) == len(others) >= 2
        sites = [site for site in one.plan if site.name in each.sites]
        assert {(site.codec, site.algorithm) for site in sites} <= named
        for other in others:
            assert bool(other.refused) == (not other.stages)
            assert bool(other.refused) == (other.predicted_us == 0.0)


@pytest.mark.slow
def test_candidates_come_best_first_and_all_but_one_have_a_reason(dumped):
    (one,) = dumped()
    for site in one.plan:
        rows = candidates(one, site)
        scored = [row for row in rows if not row.refused]
        assert [row.predicted_us for row in scored] == sorted(row.predicted_us for row in scored)
        assert [lost(row, site) for row in rows].count("chosen") == 1
        assert lost(scored[0], site) == "chosen"
        assert all("slower" in lost(row, site) for row in scored[1:])
        assert sum(not row.compressed for row in scored) == 1


@pytest.mark.slow
def test_table_shows_scores_the_reason_and_what_is_not_possible(dumped, tmp_path):
    (one,) = dumped()
    site = one.plan.sites[0]
    shown = explained(tmp_path, "--why", "all_reduce")
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("all_reduce: all_reduce of 1.0 MiB in the root module, graph 0")
    (chosen,) = [line for line in lines if line.rstrip().endswith("chosen")]
    assert chosen.split()[:2] == [site.codec, site.algorithm]
    assert f"{site.error:.3%}" in chosen
    (alone,) = [line for line in lines if "uncompressed" in line]
    assert "slower" in alone
    assert site.reason in shown.stdout
    assert "selects no indices" in shown.stdout
    assert "all_reduce_1" not in shown.stdout


def test_left_alone_says_of_each_codec_why_it_lost(dumped):
    (one,) = dumped(profile="ethernet-100g")
    (site, *_) = one.plan
    assert not site.compressed
    rows = candidates(one, site)
    assert lost(rows[0], site) == "chosen"
    assert not rows[0].compressed
    assert all("slower" in lost(row, site) for row in rows[1:] if not row.refused)


def test_gain_below_the_margin_and_a_forced_loss_are_distinguished(dumped):
    profile = commpass.Profile("narrow", commpass.Link(1.0, 0.5), margin=0.9)
    (one,) = dumped(profile=profile)
    (site, *_) = one.plan
    assert not site.compressed
    reasons = [lost(row, site) for row in candidates(one, site)]
    assert any("not above the model's margin" in reason for reason in reasons)


@pytest.mark.slow
def test_codec_that_is_forced_leaves_alone_behind_though_it_is_faster(dumped):
    (one,) = dumped(Policy(rules=[Rule(codec="int8", force=True)]), "nvlink")
    (site, *_) = one.plan
    assert site.compressed
    (alone,) = [row for row in candidates(one, site) if not row.compressed]
    assert alone.predicted_us < site.predicted_us
    assert lost(alone, site) == "a codec is forced here"


@pytest.mark.every
def test_refused_by_the_error_budget(dumped):
    (one,) = dumped(Policy(codecs=("int8", "int4"), max_error=0.02))
    (site, *_) = one.plan
    rows = candidates(one, site)
    refused = [row for row in rows if row.codec == "int4" and row.error]
    assert refused
    assert all("is above the budget of 2.000%" in lost(row, site) for row in refused)


@pytest.mark.slow
def test_sites_of_a_module_are_found_by_its_name(fake_group, tmp_path):
    class Layer(torch.nn.Module):
        def forward(self, x):
            return function(x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x):
            return self.layer(x)

    fake_group(8)
    backend = commpass.backend("balanced", inner="eager", profile="ethernet-1g", dump=tmp_path)
    torch.compile(Model(), backend=backend)(torch.randn(512, 512))
    dumps = dump.read_run(tmp_path)
    assert len(considered(dumps, "layer")) == 3
    assert explained(tmp_path, "--why", "layer").stdout.count("of 1.0 MiB in layer") == 3


@pytest.mark.slow
def test_unknown_name_is_refused_with_the_nearest(dumped, tmp_path):
    dumped()
    shown = explained(tmp_path, "--why", "all_reduce_2")
    assert shown.exit_code == 2
    assert "no site 'all_reduce_2' in this run; did you mean 'all_reduce_1'?" in shown.stderr


@pytest.mark.slow
def test_positions_of_a_coalesced_collective_and_globs_over_modules_are_found(dumped):
    (one,) = dumped()
    site = dataclasses.replace(one.plan.sites[0], name="both.1", module="layers.3.mlp")
    plan = dataclasses.replace(one.plan, sites=(site,))
    one = dataclasses.replace(one, plan=plan)
    for name in ("both", "both.1", "layers.3.mlp", "layers.3", "layers.*", "**.mlp"):
        assert [found for _, found in considered([one], name)] == [site]
    with pytest.raises(CommpassError, match=r"no site 'layers\.4'"):
        considered([one], "layers.4")
    root = dataclasses.replace(site, name="all_reduce_1", module="")
    one = dataclasses.replace(one, plan=dataclasses.replace(plan, sites=(root,)))
    for name in ("**", "*", "all_*", "all_reduce*"):
        assert [found for _, found in considered([one], name)] == [root]
    with pytest.raises(CommpassError, match="no site 'layers'"):
        considered([one], "layers")


@pytest.mark.slow
def test_dump_from_before_candidates_were_kept_says_so(dumped, tmp_path):
    dumped()
    (file,) = dump.files(tmp_path)
    old = json.loads(file.read_text())
    del old["considered"]
    file.write_text(json.dumps(old))
    shown = explained(tmp_path, "--why", "all_reduce")
    assert shown.exit_code == 2
    assert "written before dumps had them" in shown.stderr


def test_plan_that_was_not_carried_out_has_no_table(fake_group, tmp_path):
    fake_group(8)
    backend = commpass.backend(
        Policy(codecs="int8", skip="rewrite"), inner="eager", profile="ethernet-1g", dump=tmp_path
    )
    torch.compile(function, backend=backend)(torch.randn(512, 512))
    shown = explained(tmp_path, "--why", "all_reduce")
    assert shown.exit_code == 0
    assert "The untouched graph was compiled: the policy skips pass 'rewrite'" in shown.stdout
    assert "chosen" not in shown.stdout


@pytest.mark.slow
def test_table_as_json_has_all_candidates_of_a_site(dumped, tmp_path):
    dumped()
    (row,) = json.loads(explained(tmp_path, "--why", "all_reduce", "--json").stdout)
    assert row["graph"] == 0
    assert row["site"]["name"] == "all_reduce"
    first = row["candidates"][0]
    assert (first["codec"], first["algorithm"]) == (row["site"]["codec"], row["site"]["algorithm"])
    assert {stage["role"] for stage in first["stages"]} >= {"encode", "exchange", "decode"}


def test_split_sites_are_found_by_the_name_of_the_whole(fake_group, tmp_path):
    fake_group(8)

    def function(x, w):
        return ops.wait_tensor(ops.all_reduce(x @ w, "sum", "0")) + 1

    policy = Policy(rows=2, more_memory=1.0)
    backend = commpass.backend(policy, inner="eager", dump=tmp_path, strict=True)
    with torch.no_grad():
        torch.compile(function, backend=backend)(torch.randn(64, 64), torch.randn(64, 64))
    (one,) = dump.read_run(tmp_path)
    (split,) = one.plan.split
    said = " ".join(explained(tmp_path, "--why", split.site).stdout.split())
    assert f"chunk 1 of 2 of {split.site} (rows 32 + 32: policy 'custom' says rows=2)" in said
    assert f"chunk 2 of 2 of {split.site}" in said
    assert f"Its candidates are those of {split.into[0]}." in said
    assert said.count("why not") == 1


def test_rows_that_do_not_apply_are_reported(fake_group, tmp_path):
    fake_group(8)

    def function(x):
        return ops.wait_tensor(ops.all_reduce(x, "sum", "0")) + 1

    backend = commpass.backend(Policy(rows=2), inner="eager", dump=tmp_path, strict=True)
    with torch.no_grad():
        torch.compile(function, backend=backend)(torch.randn(64, 64))
    said = " ".join(explained(tmp_path, "--why", "all_reduce").stdout.split())
    assert "rows=2 does not apply" in said


@pytest.mark.slow
def test_grouped_sites_are_found_by_the_names_of_their_members(fake_group, tmp_path):
    fake_group(8)

    class Norms(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.LayerNorm(64) for _ in range(2))

        def forward(self, x):
            starts = [ops.all_reduce(norm(x), "sum", "0") for norm in self.layers]
            return [ops.wait_tensor(start) + 1 for start in starts]

    backend = commpass.backend("lossless", inner="eager", dump=tmp_path, strict=True)
    with torch.no_grad():
        torch.compile(Norms(), backend=backend)(torch.randn(4, 64))
    (one,) = dump.read_run(tmp_path)
    (fused,) = one.plan.grouped
    said = explained(tmp_path)
    assert "2 grouped" in said.stdout
    assert fused.into in said.stdout
    assert fused.reason in said.stdout
    for name in (*fused.sites, fused.into):
        said = explained(tmp_path, "--why", name)
        assert f"grouped of {', '.join(fused.sites)}" in said.stdout
    with pytest.raises(CommpassError, match=f"did you mean '{fused.sites[0]}'"):
        considered([one], fused.sites[0] + "x")

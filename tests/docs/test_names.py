"""The page of compatibility leaves out no name of torch's or Apex's, and its defaults are ours."""

import inspect
import re

import pytest
import torch
import torch.distributed
import torch.multiprocessing
import torch.nn.parallel
import torch.utils.data
from torch import nn
from torch.distributed.run import get_args_parser

import paceline
import paceline.parallel
import paceline.parallel.apex as apex
from support.pages import DOCS, read_page

PAGE = read_page(DOCS / "compatibility.md")
TORCH = torch.nn.parallel

# Apex's own arguments, from its last release with amp.
APEX_INITIALIZE = (
    "models optimizers enabled opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights "
    "loss_scale cast_model_outputs num_losses verbosity min_loss_scale max_loss_scale"
)
APEX_DDP = (
    "module message_size delay_allreduce shared_param allreduce_trigger_params retain_allreduce_buffers "
    "allreduce_always_fp32 num_allreduce_streams allreduce_communicators gradient_average gradient_predivide_factor "
    "gradient_average_split_factor prof"
)


def parameters(function):
    found = inspect.signature(function).parameters
    return {name: value for name, value in found.items() if name != "self" and not name.startswith("_")}


# The heading, torch's callable or Apex's names, and ours.
CALLS = {
    "DDP": (
        "DistributedDataParallel",
        TORCH.DistributedDataParallel.__init__,
        paceline.DistributedDataParallel.__init__,
    ),
    "DataParallel": ("DataParallel", TORCH.DataParallel.__init__, paceline.DataParallel.__init__),
    "data_parallel": ("DataParallel", TORCH.data_parallel, paceline.parallel.data_parallel),
    "scatter": ("DataParallel", TORCH.scatter, paceline.parallel.scatter),
    "replicate": ("DataParallel", TORCH.replicate, paceline.parallel.replicate),
    "parallel_apply": ("DataParallel", TORCH.parallel_apply, paceline.parallel.parallel_apply),
    "gather": ("DataParallel", TORCH.gather, paceline.parallel.gather),
    "SyncBatchNorm": ("SyncBatchNorm", nn.SyncBatchNorm.__init__, paceline.SyncBatchNorm.__init__),
    "convert": (
        "SyncBatchNorm",
        nn.SyncBatchNorm.convert_sync_batchnorm,
        paceline.SyncBatchNorm.convert_sync_batchnorm,
    ),
    "sampler": (
        "DistributedSampler and DataLoader",
        torch.utils.data.DistributedSampler.__init__,
        paceline.DistributedSampler.__init__,
    ),
    "loader": (
        "DistributedSampler and DataLoader",
        torch.utils.data.DataLoader.__init__,
        paceline.DataLoader.__init__,
    ),
    "batch sampler": (
        "DistributedSampler and DataLoader",
        torch.utils.data.BatchSampler.__init__,
        paceline.BatchSampler.__init__,
    ),
    "spawn": ("spawn", torch.multiprocessing.spawn, paceline.spawn),
    "initialize": ("Apex", APEX_INITIALIZE, paceline.amp.initialize),
    "scale_loss": ("Apex", "loss optimizers loss_id model delay_unscale delay_overflow_check", paceline.amp.scale_loss),
    "apex DDP": ("Apex", APEX_DDP, apex.DistributedDataParallel.__init__),
    "Reducer": ("Apex", "module_or_grads_list", apex.Reducer.__init__),
    "convert_syncbn_model": ("Apex", "module process_group channel_last", apex.convert_syncbn_model),
    "LARC": ("Apex", "optimizer trust_coefficient clip eps", apex.LARC.__init__),
}


def named_in(heading):
    """What stands between backquotes in that section: names, and those of calls and flags."""
    return set(re.findall(r"[\w-]+", " ".join(re.findall(r"`([^`]+)`", PAGE.section(heading)))))


@pytest.mark.parametrize("call", CALLS)
def test_every_argument_stands_on_the_page_and_is_taken(call):
    heading, theirs, ours = CALLS[call]
    names = set(theirs.split() if isinstance(theirs, str) else parameters(theirs))
    assert names - named_in(heading) == set()
    assert names - parameters(ours).keys() == set()
    assert set(parameters(ours)) - named_in(heading) == set()


def test_every_argument_of_init_process_group_stands_on_the_page():
    theirs = parameters(torch.distributed.init_process_group)
    assert set(theirs) - named_in("Process groups") == set()


def test_every_method_of_torchs_wrapper_stands_on_the_page_and_is_there():
    methods = {name for name in vars(TORCH.DistributedDataParallel) if not name.startswith("_")} - {"broadcast_buffers"}
    assert methods - named_in("DistributedDataParallel") == set()
    assert all(hasattr(paceline.DistributedDataParallel, name) for name in methods)


def test_every_flag_of_torchrun_stands_on_the_page():
    flags = {flag for action in get_args_parser()._actions for flag in action.option_strings} - {"-h", "--help"}
    hyphenated = {flag for flag in flags if "_" not in flag}
    assert hyphenated - named_in("torchrun") == set()


def test_every_option_of_ours_stands_on_the_page():
    from paceline.cli import command

    flags = {flag for option in command.commands["run"].params for flag in option.opts if flag.startswith("--")}
    assert {flag for flag in flags if "_" not in flag} - named_in("torchrun") == set()


# The tables of arguments with defaults, section by section.
TABLES = {
    "DistributedDataParallel": ["DDP"],
    "DataParallel": ["DataParallel"],
    "DistributedSampler and DataLoader": ["sampler", "loader"],
    "spawn": ["spawn"],
    "Apex": ["initialize", "scale_loss", "apex DDP"],
}


@pytest.mark.parametrize("heading", TABLES)
def test_the_defaults_on_the_page_are_ours(heading):
    tables = re.findall(r"(?m)^\| argument[^|]*\| default \| \|\n((?:\|.*\n)+)", PAGE.section(heading))
    for call, table in zip(TABLES[heading], tables, strict=True):
        ours = parameters(CALLS[call][2])
        for name, stated in re.findall(r"(?m)^\| `(\w+)` \| `?([^|` ]*)`? \|", table):
            default = "" if ours[name].default is inspect.Parameter.empty else ours[name].default
            assert stated.replace(",", "") == str(default) or stated == f'"{default}"', f"{call}: {name}"

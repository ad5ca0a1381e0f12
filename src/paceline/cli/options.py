"""What the options of ``paceline run`` come to."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import LaunchError
from paceline.launch.conductor.exports import exported
from paceline.launch.conductor.hostfile import HostSpec, parse_hosts, read_hostfile
from paceline.launch.conductor.job import Job
from paceline.launch.conductor.ssh import current_folder
from paceline.launch.counts import resolve_num_ranks
from paceline.launch.hosts.slurm_step import Step, read_step
from paceline.launch.layout import LOOPBACK
from paceline.launch.spec.launch import LaunchSpec, check_signals
from paceline.launch.spec.logs import LogSpec, parse_filters, parse_ranks, parse_streams
from paceline.launch.spec.nodes import NodesSpec


def spec_of(script: str, args: tuple[str, ...], given: Mapping[str, Any]) -> LaunchSpec:
    """The launch that was asked for.

    Raises:
        LaunchError: values that cannot be, or that contradict one another.
    """
    for name, what in (("logs_specs", "--logs-specs"), ("event_log_handler", "--event-log-handler")):
        if given[name] not in (None, "", "null", "default"):
            raise LaunchError(f"{what} {given[name]}: plugins of torchrun's do not run here; leave it out")
    num_nodes, num_ranks = given["nnodes"], given["num_ranks"]
    if given["num_gpus"] is not None:
        num_nodes, num_ranks = given["num_ranks"] or num_nodes, str(given["num_gpus"])
    step = None if given["standalone"] or _tells_of_hosts(num_nodes, given) else read_step(os.environ)
    if step is not None:
        num_ranks = step.num_ranks(num_ranks)
    port = given["master_port"] or 0
    if given["standalone"]:
        nodes = NodesSpec()
    elif step is not None and step.placement.world_size > 1:
        nodes, port = _nodes_of_step(step, given), port or step.placement.port or 0
    else:
        nodes = _nodes_of(num_nodes or "1", given)
    return LaunchSpec(
        script,
        args,
        is_module=given["module"],
        is_command=given["no_python"] and not given["run_path"],
        num_ranks=resolve_num_ranks(num_ranks or "1"),
        master_port=port,
        grace_s=given["grace_s"],
        max_restarts=given["max_restarts"],
        role=given["role"],
        has_virtual_local_rank=given["virtual_local_rank"] or (step is not None and step.binds_gpus),
        numa_binding=given["numa_binding"] or "",
        signals=_signals_of(given),
        report_path=given["report_path"],
        hang_timeout_s=given["hang_timeout_s"],
        logs=_logs_of(given),
        nodes=nodes,
    )


def job_of(script: str, args: tuple[str, ...], given: Mapping[str, Any]) -> Job | None:
    """The launch on several hosts that was asked for; None where none was.

    Raises:
        LaunchError: values that cannot be, or that contradict one another.
    """
    if given["hosts"] is None and given["hostfile"] is None:
        for option in ("export", "python", "workdir"):
            if given["exports" if option == "export" else option]:
                raise LaunchError(f"--{option} is for hosts that are reached over ssh; name them with --hosts")
        return None
    if given["hosts"] is not None and given["hostfile"] is not None:
        raise LaunchError("--hosts and --hostfile both name the hosts; leave one of them out")
    hosts = read_hostfile(given["hostfile"]) if given["hosts"] is None else parse_hosts(given["hosts"])
    _check_beside_hosts(given, hosts)
    check_signals(_signals_of(given))
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    beside = {"hosts", "hostfile", "exports", "python", "workdir", "report_path"}
    return Job(
        hosts,
        script,
        args,
        options={**{name: value for name, value in given.items() if name not in beside}, "report_path": ""},
        python=(given["python"] or sys.executable, *flags),
        folder=given["workdir"] or current_folder(os.environ),
        environment=exported(os.environ, given["exports"]),
        signals=_signals_of(given),
        has_streams_apart=not _logs_of(given).is_plain,
        max_restarts=given["max_restarts"],
        report_path=given["report_path"],
    )


def _check_beside_hosts(given: Mapping[str, Any], hosts: Sequence[HostSpec]) -> None:
    """What several launchers must be told, one for all of them finds out."""
    own = {
        "nnodes": None,
        "node_rank": None,
        "master_addr": None,
        "rdzv_backend": None,
        "rdzv_endpoint": "",
        "rdzv_conf": "",
        "local_addr": "",
        "standalone": False,
        "num_gpus": None,
    }
    for name, default in own.items():
        if given[name] != default:
            option = "-g" if name == "num_gpus" else f"--{name.replace('_', '-')}"
            raise LaunchError(
                f"{option} {given[name]} says what --hosts or --hostfile finds out by itself; leave it out "
                f"(or unset PET_{name.upper()})"
            )
    if given["num_ranks"] and all(host.num_ranks is not None for host in hosts):
        raise LaunchError(
            f"-n {given['num_ranks']} is for hosts of which no number is said, but all have one; leave it out, or the "
            "numbers after the hosts"
        )


def _signals_of(given: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in given["signals_to_handle"].split(",") if name)


def _logs_of(given: Mapping[str, Any]) -> LogSpec:
    return LogSpec(
        given["log_dir"],
        parse_streams(given["redirects"], "--redirects"),
        parse_streams(given["tee"], "--tee"),
        parse_ranks(given["local_ranks_filter"], "--local-ranks-filter"),
        {
            stream: words
            for stream in ("stdout", "stderr")
            if (words := parse_filters(given[f"duplicate_{stream}_filters"]))
        },
    )


def _tells_of_hosts(num_nodes: str | None, given: Mapping[str, Any]) -> bool:
    """Whether the command line says which hosts there are, so that Slurm is not asked."""
    return num_nodes is not None or any(
        given[name] not in (None, "") for name in ("node_rank", "rdzv_backend", "rdzv_endpoint")
    )


def _nodes_of_step(step: Step, given: Mapping[str, Any]) -> NodesSpec:
    nodes = step.nodes(given["rdzv_id"], given["rdzv_conf"], given["local_addr"])
    return replace(nodes, address=given["master_addr"]) if given["master_addr"] else nodes


def _nodes_of(num_nodes: str, given: Mapping[str, Any]) -> NodesSpec:
    least, _, most = num_nodes.partition(":")
    try:
        bounds = int(least), int(most or least)
    except ValueError:
        raise LaunchError(f"expected --nnodes N or LEAST:MOST, but got {num_nodes!r}") from None
    return NodesSpec(
        *bounds,
        node_rank=given["node_rank"] or 0,
        backend=given["rdzv_backend"] or "static",
        endpoint=given["rdzv_endpoint"],
        run_id="" if given["rdzv_id"] == "none" else given["rdzv_id"],
        conf=given["rdzv_conf"],
        address=given["master_addr"] or LOOPBACK,
        local_address=given["local_addr"],
    )

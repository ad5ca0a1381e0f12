"""What the options of ``paceline run`` come to."""

from collections.abc import Mapping
from typing import Any

from paceline.errors import LaunchError
from paceline.launch.counts import resolve_num_ranks
from paceline.launch.hosts.layout import LOOPBACK
from paceline.launch.output.logs import LogSpec, parse_filters, parse_ranks, parse_streams
from paceline.launch.spec import LaunchSpec, NodesSpec


def spec_of(script: str, args: tuple[str, ...], given: Mapping[str, Any]) -> LaunchSpec:
    """The launch that was asked for.

    Raises:
        LaunchError: values that cannot be, or that contradict one another.
    """
    for name, what in (("logs_specs", "--logs-specs"), ("event_log_handler", "--event-log-handler")):
        if given[name] not in (None, "", "null", "default"):
            raise LaunchError(f"{what} {given[name]}: plugins of torchrun's do not run here; leave it out")
    num_nodes, num_ranks = given["nnodes"], given["num_ranks"] or "1"
    if given["num_gpus"] is not None:
        num_nodes, num_ranks = given["num_ranks"] or num_nodes, str(given["num_gpus"])
    return LaunchSpec(
        script,
        args,
        is_module=given["module"],
        is_command=given["no_python"] and not given["run_path"],
        num_ranks=resolve_num_ranks(num_ranks),
        master_port=given["master_port"] or 0,
        grace_s=given["grace_s"],
        max_restarts=given["max_restarts"],
        role=given["role"],
        has_virtual_local_rank=given["virtual_local_rank"],
        numa_binding=given["numa_binding"] or "",
        signals=tuple(name for name in given["signals_to_handle"].split(",") if name),
        report_path=given["report_path"],
        hang_timeout_s=given["hang_timeout_s"],
        logs=LogSpec(
            given["log_dir"],
            parse_streams(given["redirects"], "--redirects"),
            parse_streams(given["tee"], "--tee"),
            parse_ranks(given["local_ranks_filter"], "--local-ranks-filter"),
            {
                stream: words
                for stream in ("stdout", "stderr")
                if (words := parse_filters(given[f"duplicate_{stream}_filters"]))
            },
        ),
        nodes=NodesSpec() if given["standalone"] else _nodes_of(num_nodes, given),
    )


def _nodes_of(num_nodes: str, given: Mapping[str, Any]) -> NodesSpec:
    least, _, most = num_nodes.partition(":")
    try:
        bounds = int(least), int(most or least)
    except ValueError:
        raise LaunchError(f"expected --nnodes N or LEAST:MOST, but got {num_nodes!r}") from None
    return NodesSpec(
        *bounds,
        node_rank=given["node_rank"],
        backend=given["rdzv_backend"],
        endpoint=given["rdzv_endpoint"],
        run_id="" if given["rdzv_id"] == "none" else given["rdzv_id"],
        conf=given["rdzv_conf"],
        address=given["master_addr"] or LOOPBACK,
        local_address=given["local_addr"],
    )

"""``paceline run``: torchrun's command line for the ranks of one host."""

import click


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Run a script on N ranks of this host.",
)
@click.option(
    "-n",
    "--nproc-per-node",
    "--nproc_per_node",
    "num_ranks",
    default="1",
    show_default=True,
    metavar="N|auto|cpu|gpu",
    help="Ranks on this host: a number, one a usable core, one a GPU, or (auto) one a GPU where there are any.",
)
@click.option(
    "--master-port",
    "--master_port",
    default=0,
    show_default="any free one",
    metavar="PORT",
    help="Port on which the ranks meet.",
)
@click.option(
    "--grace",
    "grace_s",
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    envvar="PACELINE_GRACE",
    show_envvar=True,
    help="How long ranks that are asked to stop may take before they are killed.",
)
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module's name, as in `python -m`.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(num_ranks: str, master_port: int, grace_s: float, is_module: bool, script: str, args: tuple[str, ...]) -> int:
    """Run SCRIPT on N ranks of this host; what stands after SCRIPT belongs to it.

    \b
        paceline run -n 4 train.py --lr 0.1
        paceline run -n gpu -m package.train

    Each rank finds torchrun's environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on. torch is imported
    once for all ranks. OMP_NUM_THREADS, unless you set it, shares the cores out among them.

    When a rank fails the others are stopped; its traceback is printed last, and its exit code is that of the launcher.
    Ctrl-C interrupts all ranks, a second one kills them. SIGTERM and SIGHUP stop them, SIGUSR1 and SIGUSR2 are passed
    on. Nothing that the ranks started in their process groups outlives the launcher.
    """
    from paceline.launch import LaunchSpec, launch
    from paceline.launch.counts import resolve_num_ranks

    spec = LaunchSpec(script, args, is_module, resolve_num_ranks(num_ranks), master_port, grace_s)
    return launch(spec)

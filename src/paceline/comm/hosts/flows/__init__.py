"""What becomes of each block of a tensor on its way between hosts: one flow for each kind of collective."""

from paceline.comm.hosts.flows.broadcast import Broadcast
from paceline.comm.hosts.flows.flow import Flow, Sends, Site
from paceline.comm.hosts.flows.reduce import Reduce
from paceline.comm.hosts.flows.sizes import Sizes
from paceline.comm.hosts.flows.windows import AllGather, ReduceScatter

__all__ = ["AllGather", "Broadcast", "Flow", "Reduce", "ReduceScatter", "Sends", "Site", "Sizes"]

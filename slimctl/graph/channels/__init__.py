"""Which channels of which tensors must go together, and how to take them out."""

from slimctl.graph.channels.analysis import analyze
from slimctl.graph.channels.coupling import Channels, Family, Member, Role
from slimctl.graph.channels.groups import Group, Groups, group_units
from slimctl.graph.channels.removal import remove_channels, silence_channels

__all__ = [
    "Channels",
    "Family",
    "Group",
    "Groups",
    "Member",
    "Role",
    "analyze",
    "group_units",
    "remove_channels",
    "silence_channels",
]

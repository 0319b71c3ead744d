"""The group `hosts`: what `nccl` connects its ranks by, with the data of collectives going over that too."""

from typing import Self

from irpar.runtime.groups.spmd import Finish, Meeting
from irpar.runtime.groups.wire.connect import meet
from irpar.runtime.groups.wire.wired import WiredGroup
from irpar.runtime.launch.environment import World
from irpar.sharding import Mesh


class HostsGroup(WiredGroup):
    """Sends all data over the connections between hosts."""

    @classmethod
    def join(cls, mesh: Mesh, seconds: float) -> Self:
        world = World.of_environment()
        assert world is not None
        control, about = meet(world, mesh, {"rank": world.rank}, seconds)
        assert [each["rank"] for each in about] == list(range(world.size))
        return cls(mesh, world.rank, seconds, control)

    def move(self, meeting: Meeting) -> Finish:
        return self.through_hosts(meeting)

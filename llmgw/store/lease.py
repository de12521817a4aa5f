"""Who leads: one row, on the database's clock, for control planes that share a PostgreSQL.

Only whoever holds the lease decides and talks to agents. To take it is to take the next epoch, in one transaction, so
that nothing of an earlier holder is written or obeyed afterwards. On SQLite there is nobody else: its file is locked.
"""

from __future__ import annotations

from attrs import field, frozen

from llmgw.store.database import Connection, Database

TTL_S = 15.0
RENEW_S = 5.0
STOP_S = 10.0
"""A holder that has not renewed for so long, on its own monotonic clock, stops: nobody else can hold it before
:data:`TTL_S`."""

LOAD_S = 10.0
"""What a router said longer ago than this does not count any more."""

_NOW = "SELECT CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"


@frozen
class Leader:
    """Who holds the lease: its own name, and where its link and its admin API can be reached."""

    holder: str
    link: str
    admin: str
    epoch: int = field(default=0, eq=False)


class Leases:
    """The lease in an open PostgreSQL database. Methods raise :class:`llmgw.store.database.StoreError`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def take(self, me: Leader) -> int | None:
        """The new epoch when the lease is free, run out or already held by ``me``; nothing when another holds it."""

        def work(connection: Connection) -> int | None:
            now = _now(connection)
            found = connection.execute("SELECT holder, expires FROM lease").fetchone()
            if found is not None and found[0] != me.holder and found[1] > now:
                return None
            epoch: int = connection.execute("UPDATE cluster SET epoch = epoch + 1 RETURNING epoch").fetchone()[0]
            connection.execute("DELETE FROM lease")
            connection.execute(
                'INSERT INTO lease ("only", holder, link, admin, epoch, expires) VALUES (1, ?, ?, ?, ?, ?)',
                (me.holder, me.link, me.admin, epoch, now + TTL_S),
            )
            return epoch

        return await self._db.write(work)

    async def renew(self, me: Leader, epoch: int) -> bool:
        """Hold the lease for another :data:`TTL_S`; whether it was still ours."""

        def work(connection: Connection) -> bool:
            now = _now(connection)
            held = "UPDATE lease SET expires = ? WHERE holder = ? AND epoch = ? AND expires > ?"
            return connection.execute(held, (now + TTL_S, me.holder, epoch, now)).rowcount == 1

        return await self._db.write(work)

    async def release(self, me: Leader, epoch: int) -> None:
        """Let go of the lease, so that another one need not wait."""
        gone = "DELETE FROM lease WHERE holder = ? AND epoch = ?"
        await self._db.write(lambda connection: connection.execute(gone, (me.holder, epoch)))

    async def leader(self) -> Leader | None:
        """Who holds the lease now."""

        def work(connection: Connection) -> Leader | None:
            asked = "SELECT holder, link, admin, epoch FROM lease WHERE expires > ?"
            found = connection.execute(asked, (_now(connection),)).fetchone()
            return None if found is None else Leader(*found)

        return await self._db.read(work)

    async def save_load(self, instance: str, load: str) -> None:
        """What the router of a control plane that does not lead has to do, as text."""
        save = (
            "INSERT INTO router_load VALUES (?, ?, ?)"
            " ON CONFLICT (instance) DO UPDATE SET row = excluded.row, at = excluded.at"
        )
        await self._db.write(lambda connection: connection.execute(save, (instance, load, _now(connection))))

    async def loads(self, me: str) -> tuple[str, ...]:
        """What the routers of all others said lately."""

        def work(connection: Connection) -> tuple[str, ...]:
            asked = "SELECT row FROM router_load WHERE instance <> ? AND at > ?"
            found = connection.execute(asked, (me, _now(connection) - LOAD_S))
            return tuple(text for (text,) in found)

        return await self._db.read(work)


def _now(connection: Connection) -> float:
    """The database's clock, in epoch seconds."""
    now: float = connection.execute(_NOW).fetchone()[0]
    return now

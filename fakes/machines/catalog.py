"""The machines that the demo and the tests use, by name."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from .description import Card, Hca, Machine, Mig

_H100 = Card("NVIDIA H100 80GB HBM3", 81559, "9.0")
_A100 = Card("NVIDIA A100-SXM4-80GB", 81920, "8.0")
_B200 = Card("NVIDIA B200", 183359, "10.0")
_L40S = Card("NVIDIA L40S", 46068, "8.9", mig_capable=False)
_4090 = Card("NVIDIA GeForce RTX 4090", 24564, "8.9", mig_capable=False)


def _board(card: Card, count: int, a_switch: int) -> tuple[Card, ...]:
    """Cards of one board, so many behind each PCIe switch, half of the switches at each processor."""
    switches = count // a_switch
    return tuple(
        evolve(card, switch=n // a_switch, numa=0 if n // a_switch < switches // 2 else 1) for n in range(count)
    )


def _beside(cards: tuple[Card, ...], *, rate: str = "400 Gb/sec (4X NDR)", first: int = 0) -> tuple[Hca, ...]:
    """One InfiniBand adapter behind the switch of each card."""
    return tuple(
        Hca(f"mlx5_{first + n}", rate=rate, netdev=f"ib{n}", switch=card.switch, numa=card.numa)
        for n, card in enumerate(cards)
    )


_DGX_A100 = _board(_A100, 8, 2)
_HGX_H100 = _board(_H100, 8, 1)
_HGX_B200 = _board(_B200, 8, 1)

MACHINES: Mapping[str, Machine] = {
    "dgx-a100": Machine(
        "DGX A100: 8 GPUs on NVSwitch, 8 InfiniBand adapters, 2 Ethernet ports in a bond",
        _DGX_A100,
        (
            *_beside(_DGX_A100, rate="200 Gb/sec (4X HDR)"),
            Hca("mlx5_8", "Ethernet", "200 Gb/sec (4X HDR)", netdev="enp225s0f0", bond="bond0", numa=1),
            Hca("mlx5_9", "Ethernet", "200 Gb/sec (4X HDR)", netdev="enp225s0f1", bond="bond0", numa=1),
        ),
        driver="550.127.08",
        cuda="12.4",
        nvswitch=12,
    ),
    "hgx-h100": Machine(
        "HGX H100: 8 GPUs on NVSwitch, 8 InfiniBand adapters and one for Ethernet",
        _HGX_H100,
        (
            *_beside(_HGX_H100),
            Hca("mlx5_8", "Ethernet", "100 Gb/sec (4X EDR)", netdev="ens1f0np0", address="10.20.0.11/24"),
        ),
        nvswitch=18,
    ),
    "hgx-b200": Machine(
        "HGX B200: 8 GPUs on NVSwitch, 4 adapters that manage the switches, 8 RoCE rails",
        _HGX_B200,
        (
            *(Hca(f"mlx5_{n}", switch_management=True, numa=1) for n in range(4)),
            *(
                Hca(
                    f"mlx5_{4 + n}",
                    "Ethernet",
                    netdev=f"rail{n}",
                    address=f"10.30.{n}.2/31",
                    switch=card.switch,
                    numa=card.numa,
                )
                for n, card in enumerate(_HGX_B200)
            ),
        ),
        driver="580.105.08",
        cuda="13.0",
        nvswitch=18,
    ),
    "a100-mig": Machine(
        "two A100, one of them cut into 4g.40gb and 3g.40gb",
        (
            evolve(_A100, mig=(Mig("4g.40gb", 40192, 1), Mig("3g.40gb", 40192, 2))),
            evolve(_A100, numa=1),
        ),
    ),
    "h100-7x1g": Machine(
        "one H100 cut into seven 1g.10gb",
        (evolve(_H100, mig=tuple(Mig("1g.10gb", 9984, 7 + n) for n in range(7))),),
    ),
    "l40s-2": Machine("two L40S on PCIe", (_L40S, evolve(_L40S, numa=1))),
    "rtx-4090-4": Machine("four RTX 4090 in a workstation", (_4090,) * 4, driver="575.57.08", cuda="12.9"),
    "gb10": Machine(
        "GB10 with unified memory and one cable that shows as two RoCE adapters",
        (Card("NVIDIA GB10", None, "12.1", mig_capable=False),),
        (
            Hca("rocep1s0f0", "Ethernet", "200 Gb/sec (4X HDR)", netdev="enp1s0f0np0", address="192.168.177.10/24"),
            Hca("roceP2p1s0f0", "Ethernet", "200 Gb/sec (4X HDR)", netdev="enP2p1s0f0np0", address="192.168.178.10/24"),
        ),
        driver="580.95.05",
        cuda="13.0",
        memory_mib=124610,
    ),
    "t4-vm": Machine(
        "cloud VM with one T4", (Card("Tesla T4", 15360, "7.5", mig_capable=False),), driver="535.183.01", cuda="12.2"
    ),
    "none": Machine("a machine without any GPU", driver=None),
}

"""Facts about the machine, read from text that the tests give or from the machine itself."""

from __future__ import annotations

import socket

from guard.machine import Gpu, cpu_flags, free_port, installed_version, module_installed, parse_gpus, port_is_free


def test_gpus_are_read_from_the_drivers_table() -> None:
    text = "NVIDIA H200, 580.95.05, 143771\nNVIDIA GB10, 580.1, [N/A]\n\n"
    assert parse_gpus(text) == [Gpu("NVIDIA H200", "580.95.05", 143771), Gpu("NVIDIA GB10", "580.1", 0)]
    assert parse_gpus("No devices were found\n") == []


def test_a_port_is_free_until_someone_listens() -> None:
    port = free_port()
    assert port_is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not port_is_free("127.0.0.1", port)


def test_this_processor_lists_instruction_sets() -> None:
    assert cpu_flags() & {"sse2", "asimd"}


def test_distributions_and_modules_are_found_without_importing_them() -> None:
    assert installed_version("pydantic") is not None
    assert installed_version("no-such-distribution-of-the-guard") is None
    assert module_installed("json")
    assert not module_installed("no_such_module_of_the_guard")

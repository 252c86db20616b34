"""What the kernel says of the machine, and where it says nothing."""

from octavo.doctor.machine import read_machine


def test_pressure_and_memory(tmp_path):
    (tmp_path / "pressure").mkdir()
    line = (
        "some avg10={} avg60=0.00 avg300=0.00 total=1\nfull avg10=9.00 avg60=0 avg300=0 total=1\n"
    )
    (tmp_path / "pressure/cpu").write_text(line.format("12.50"))
    (tmp_path / "pressure/memory").write_text(line.format("0.25"))
    (tmp_path / "meminfo").write_text("MemTotal:  4 kB\nMemAvailable: 1 kB\nHugePages_Free: 3\n")
    found = read_machine(tmp_path)
    assert (found.cpu_pressure, found.memory_pressure) == (12.5, 0.25)
    assert (found.memory_total, found.memory_available) == (4096, 1024)


def test_a_kernel_that_says_nothing(tmp_path):
    found = read_machine(tmp_path)
    assert (found.cpu_pressure, found.memory_total) == (None, None)


def test_this_machine():
    found = read_machine()
    assert found.processors is None or found.processors >= 1
    assert found.quota is None or found.quota > 0

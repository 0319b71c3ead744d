"""What the system tells of processes."""


def process_facts(process: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (man 5 proc: field 3); empty where it cannot be read."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def process_state(process: int) -> str:
    """The letter of a process's state, such as R, S, T; empty where it cannot be seen."""
    return next(iter(process_facts(process)), "")


def processor_time(process: int) -> int | None:
    """What a process has used of the processors, in ticks (often of 10 ms); None where it cannot be seen."""
    facts = process_facts(process)
    return int(facts[11]) + int(facts[12]) if facts else None


def parent_of(process: int) -> int:
    """The parent of a process; 0 where it cannot be seen."""
    facts = process_facts(process)
    return int(facts[1]) if facts else 0


def start_of(process: int) -> int:
    """When a process started, in ticks since the system did: its number may be that of another one later."""
    facts = process_facts(process)
    return int(facts[19]) if facts else 0

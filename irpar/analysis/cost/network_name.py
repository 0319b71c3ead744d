"""What a network is called, for commands that only tell it: they read no network."""


def network_name(text: str) -> str:
    """A preset by its name, one of a file by the name in it."""
    if not text.startswith("{"):
        return text
    from .network_lookup import network_of

    return network_of(text).name

"""Sans-I/O protocol: messages, state machines `handle(event, now) -> list[Effect]`, limits, the RunSpec."""

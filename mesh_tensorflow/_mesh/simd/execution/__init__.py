"""How a traced program is called on each processor: by collectives, or sharing one memory."""

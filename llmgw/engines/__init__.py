"""How each inference engine is started and asked: command lines, environments and checks, all pure."""

"""Replay: what a record says, tried again. Each rung of the ladder is a file, and needs the ones
above it for nothing.

    check       is the record in order?                             nothing is run
    regrade     does the verifier still say so?                     the verifier
    reexecute   does the environment still answer so?               environment and sandbox
    fork        what if turn k had been different?                  the engine, too
    diff        where do two trajectories part?                     nothing is run

`reforward` and `relearn` need tensors: `agentrl.learning.reforward`, `agentrl.learning.relearn`.
"""

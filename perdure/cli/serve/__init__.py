"""Commands that run processes: `up`, `migrate`, `gateway`, `worker`, `beat`, `flower`, and `drain`."""

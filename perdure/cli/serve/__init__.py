"""Commands that run processes: `up`, `migrate`, `gateway`, `worker`, `beat`, `flower`, `channels`, and `drain`."""

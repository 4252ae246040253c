"""The engine on a real clock and real sockets: who takes part in a run, and who said so."""

"""The machine: cards, host, drivers, and which card is planned for."""

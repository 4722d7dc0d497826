"""What happens besides the graph: agreement between ranks, and the record of what was done."""

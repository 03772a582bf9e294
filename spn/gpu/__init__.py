"""What makes the networks of spn fast on a GPU; the results are those of the plain forms."""

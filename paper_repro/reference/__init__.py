"""Numbers that another implementation of BERT computed, and the script for them."""

"""One plan for every rank. Decides nothing about requests and computes nothing."""

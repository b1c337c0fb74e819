"""What training costs in memory."""

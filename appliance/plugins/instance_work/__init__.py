"""What instances have to do, as the appliance's own policy sees it."""

"""What commands share: options, tables and colours, progress bars, rows as the model sees them."""

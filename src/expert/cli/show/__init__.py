"""What commands share: options, tables and colours, progress bars."""

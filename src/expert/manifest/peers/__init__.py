"""Keys and files of other trainers: what each means here."""

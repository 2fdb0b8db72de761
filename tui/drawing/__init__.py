"""What views are drawn with: amounts, bars, curves, tables, colours."""

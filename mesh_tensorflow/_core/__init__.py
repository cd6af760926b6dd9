"""What a program is: names, shapes, layouts, graph. Free of any device."""

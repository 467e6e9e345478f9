"""How donors and receivers find, trust and understand each other."""

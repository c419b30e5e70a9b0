"""What proposes tokens: one small module a method, all behind `base.Drafter`."""

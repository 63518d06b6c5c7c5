"""How a run goes: the loop, its checks, what it says and what it leaves behind."""

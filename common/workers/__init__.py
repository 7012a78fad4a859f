"""A worker among the others: how it joins, and how nobody waits for ever."""

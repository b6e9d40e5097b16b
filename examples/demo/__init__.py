"""`make demo`: teach, distill, reinforce, compare; one page at the end."""

from examples.demo.demo import command as command

"""`python -m peerloom.node` is `peer`."""

from peerloom.node.cli import main

if __name__ == "__main__":
    main()

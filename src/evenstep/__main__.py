"""`python -m evenstep` is `evenstep`."""

from evenstep.cli.main import main

if __name__ == "__main__":
    main(prog_name="evenstep")

from .cli import main

if __name__ == "__main__":  # the started ranks import this file as well
    main()

from .cli import main

if __name__ == "__main__":  # ranks that are started import this file as well
    main()

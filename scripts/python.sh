# Sourced by the other scripts.

# find_python: prints a Python of version 3.11 or newer, or says what is missing. $PYTHON wins.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup: needs Python 3.11 or newer, and found none. Install it (Debian 12 or later:" \
        "apt-get install python3 python3-venv) or point to one: make setup PYTHON=..." >&2
    return 1
}

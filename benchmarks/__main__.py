from benchmarks import step_time

if __name__ == "__main__":
    step_time.main()
